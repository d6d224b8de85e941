"""The forms that the rounds of a key may have. Pure."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from netstorm.kvstore.values.collective import Collective
from netstorm.kvstore.values.dense import Dense
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.maxima import Maxima
from netstorm.kvstore.values.narrow import Narrow
from netstorm.kvstore.values.packed import Packed
from netstorm.kvstore.values.quantised import Quantised
from netstorm.kvstore.values.row_sparse import RowSparse
from netstorm.kvstore.values.sparse import Sparse
from netstorm.protocol.chunks import COLLECTIVE, row_length
from netstorm.protocol.codecs import MAXIMA, NARROW, PACKED, SPARSE, argument_of, family_of
from netstorm.protocol.collectives import Element, Signature
from netstorm.protocol.messages import KeySpec

__all__ = ["form_of", "forms_of"]

_ENCODED: Final = np.dtype(np.float32)
"""The type of keys whose rounds may travel in other forms than their own."""


def forms_of(spec: KeySpec) -> dict[int, Form]:
    """Return a form for each codec that parts of a key may have, the form of its initial value first.

    They serve to check and add parts. The form that writes the results comes with the operation. The codecs
    of collective keys are too many to list (`form_of`).
    """
    if spec.form == COLLECTIVE:
        return {}
    dtype = np.dtype(spec.dtype)
    if spec.form == RowSparse.codec:
        return {RowSparse.codec: RowSparse(dtype, row_length(spec.shape))}
    forms: dict[int, Form] = {Dense.codec: Dense(dtype)}
    if dtype == np.float32:  # what MXNet's gradient compression takes
        forms[Quantised.codec] = Quantised()
    if spec.shape:
        forms[RowSparse.codec] = RowSparse(dtype, row_length(spec.shape))
    return forms


def form_of(spec: KeySpec, forms: dict[int, Form], codec: int) -> Form | None:
    """Return the form of a part of a key; None: the key never has it.

    Args:
        spec: of the key.
        forms: those that the key always has.
        codec: the part's.
    """
    found = forms.get(codec)
    if found is not None:
        return found
    if spec.form == COLLECTIVE:
        signature = Signature.of_codec(codec)
        return None if signature is None else Collective(signature)
    return _encoded(codec) if Dense.codec in forms and spec.dtype == _ENCODED.name else None


@functools.lru_cache(maxsize=256)
def _encoded(codec: int) -> Form | None:
    """Return the form of float32 keys that a codec with an argument stands for; None: none."""
    family, argument = family_of(codec), argument_of(codec)
    if argument is None:
        return None
    if family == NARROW:
        return Narrow(Element(argument))
    if family == PACKED:
        return Packed(argument)
    if family == SPARSE:
        return Sparse(codec)
    return Maxima(_ENCODED) if family == MAXIMA else None
