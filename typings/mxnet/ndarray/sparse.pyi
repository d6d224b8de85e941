import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from mxnet.context import Context
from mxnet.ndarray.ndarray import NDArray

class RowSparseNDArray(NDArray):
    indices: NDArray
    data: NDArray

def _new_alloc_handle(
    stype: str,
    shape: tuple[int, ...],
    ctx: Context,
    delay_alloc: bool,
    dtype: npt.DTypeLike,
    aux_types: list[type[np.generic]],
    aux_shapes: list[tuple[int, ...]],
) -> ctypes.c_void_p: ...
def __getattr__(name: str) -> Any: ...
