"""The forms that the rounds of a key may have. Pure."""

from __future__ import annotations

import numpy as np

from netstorm.kvstore.values.dense import Dense
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.quantised import Quantised
from netstorm.kvstore.values.row_sparse import RowSparse
from netstorm.protocol.chunks import row_length
from netstorm.protocol.messages import KeySpec

__all__ = ["forms_of"]


def forms_of(spec: KeySpec) -> dict[int, Form]:
    """Return a form for each codec that parts of a key may have, the form of its initial value first.

    They serve to check and add parts. The form that writes the results comes with the operation.
    """
    dtype = np.dtype(spec.dtype)
    if spec.form == RowSparse.codec:
        return {RowSparse.codec: RowSparse(dtype, row_length(spec.shape))}
    forms: dict[int, Form] = {Dense.codec: Dense(dtype)}
    if dtype == np.float32:  # what MXNet's gradient compression takes
        forms[Quantised.codec] = Quantised()
    if spec.shape:
        forms[RowSparse.codec] = RowSparse(dtype, row_length(spec.shape))
    return forms
