"""Which forms the rounds of a key may have."""

from __future__ import annotations

import numpy as np

from netstorm.kvstore.chunk_sum import Dense
from netstorm.kvstore.form import Form
from netstorm.protocol.messages import KeySpec

__all__ = ["forms_of"]


def forms_of(spec: KeySpec) -> dict[int, Form]:
    """Return a form for each codec that parts of a key may name, the key's own form first.

    One that is known only from what others send cannot write results: the operation brings its own.
    """
    dense = Dense(np.dtype(spec.dtype))
    return {dense.codec: dense}
