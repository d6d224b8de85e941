"""How large the values of a chunk are: the sum of their absolute values (DGT's contribution of a block,
Zhou et al. 2021, is their mean). Pure.
"""

from __future__ import annotations

import numpy as np

from netstorm.kvstore.values.collective import Collective
from netstorm.kvstore.values.dense import Dense
from netstorm.kvstore.values.elements import STORED, widened
from netstorm.kvstore.values.form import Array, Form, Values
from netstorm.protocol.frames import Buffer

__all__ = ["mass_of", "mass_of_payload"]


def mass_of(values: Values | None, form: Form, elements: int) -> float:
    """Return the sum of absolute values of a chunk; of forms other than dense floats, its elements.

    Args:
        values: as the form has them; None: zeros.
        form: of the round.
        elements: of the chunk.
    """
    if values is None:
        return 0.0
    if not isinstance(values, np.ndarray):
        return float(elements)
    dense: Array = widened(values, form.signature.element) if isinstance(form, Collective) else values
    if not np.issubdtype(dense.dtype, np.floating):
        return float(elements)
    with np.errstate(all="ignore"):
        return float(np.abs(dense).sum(dtype=np.float64))


def mass_of_payload(payload: Buffer | None, form: Form, elements: int) -> float:
    """Return the same of a chunk's values as they travel."""
    if payload is None:
        return 0.0
    if isinstance(form, Collective):
        return mass_of(np.frombuffer(payload, STORED[form.signature.element]), form, elements)
    if isinstance(form, Dense):
        return mass_of(np.frombuffer(payload, form.dtype), form, elements)
    return float(elements)
