"""The memory of row-sparse arrays, inside operations of MXNet's engine, where nothing may wait.

How many rows such an array has is known only when the operation that writes it is done. MXNet's C API returns
the number by copying in an operation of its own (`MXNDArrayGetAuxNDArray`: "this function blocks"), which
inside an operation on the same array waits for ever. But the wheels export the C++ functions that MXNet's own
operators use:

* `NDArray::aux_data(0)` returns the address and number of the row numbers;
* `NDArray::SparseUpdateChunk` gives an array the memory of another one, however many rows that has. MXNet's
  custom operators write their sparse results in this way, with as many rows as there happen to be.

So nothing blocks, neither the script's thread nor an engine's. The rest has a C API that does not wait: the
values are found by `MXNDArrayGetData`, and memory for a number of rows is made by `MXNDArrayCreateSparseEx`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.compression.sparse import Rows
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.engine.library import LIBRARY_KEEPING_LOCK, check_call

__all__ = ["check_supported", "empty_rows", "filled_rows", "replace_rows", "rows_of"]

_get_data: Final = LIBRARY_KEEPING_LOCK["MXNDArrayGetData"]
_get_data.restype = ctypes.c_int
_get_data.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]

_sparse: Final = mx.nd.sparse
_HOST: Final = mx.cpu()

_Function: TypeAlias = Callable[..., None]

_BLOB_WORDS: Final = 64
"""Room for an `mxnet::TBlob`, which has 20."""


class _Blob(ctypes.Structure):
    """The begin of `mxnet::TBlob` (mxnet/tensor_blob.h): an address and a shape of one dimension."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("dimensions", ctypes.c_int32),
        ("heap", ctypes.c_int32),
        ("sides", ctypes.c_int64 * 4),
        ("rest", ctypes.c_uint64 * _BLOB_WORDS),
    )


def empty_rows(shape: tuple[int, ...], dtype: npt.DTypeLike, rows: int = 0) -> NDArray:
    """Return a new row-sparse array on the host with `rows` rows, whose contents are arbitrary.

    Its memory is allocated at once. If it came later (`delay_alloc`), `replace_rows` would leak it.
    """
    handle = _sparse._new_alloc_handle(  # noqa: SLF001 -- waits for nothing, unlike what is public
        "row_sparse", shape, _HOST, False, dtype, [np.int64], [(rows,)]
    )
    return _sparse.RowSparseNDArray(handle)


def filled_rows(shape: tuple[int, ...], dtype: npt.DTypeLike, rows: Rows) -> NDArray:
    """Return a new row-sparse array on the host with these rows, which are in order and without repeats."""
    made = empty_rows(shape, dtype, len(rows))
    new = rows_of(made)  # no one else uses the array
    new.numbers[:] = rows.numbers
    new.values[:] = rows.values.reshape(new.values.shape)
    return made


def rows_of(array: NDArray) -> Rows:
    """Return views of the rows of a row-sparse array on the host, as they are in memory: any order.

    The caller is inside an operation on `array`, or knows otherwise that nobody writes it now; the views are
    valid for as long. The values' shape is (rows, elements of a row).
    """
    aux_data, _ = _functions()
    blob = _Blob()
    aux_data(ctypes.addressof(blob), array.handle.value, 0)
    count, length = int(blob.sides[0]), int(np.prod(array.shape[1:], dtype=np.int64))
    dtype = np.dtype(array.dtype)
    if count == 0:
        return Rows(np.empty(0, np.int64), np.empty((0, length), dtype))
    address = ctypes.c_void_p()
    check_call(_get_data(array.handle, ctypes.byref(address)))
    numbers = (ctypes.c_int64 * count).from_address(blob.address)
    values = (ctypes.c_ubyte * (count * length * dtype.itemsize)).from_address(address.value or 0)
    vars(numbers)["owner"] = vars(values)["owner"] = array
    return Rows(
        np.frombuffer(memoryview(numbers), np.int64),
        np.frombuffer(memoryview(values), dtype).reshape(count, length),
    )


def replace_rows(array: NDArray, made: NDArray) -> None:
    """Give `array` the memory of `made`, an `empty_rows` that has been filled and that no one else uses.

    The caller is inside an operation that writes `array`.
    """
    _, update_chunk = _functions()
    update_chunk(array.handle.value, made.handle.value)


def check_supported() -> None:
    """Make sure that this build of MXNet has the functions that this module needs.

    Raises:
        UsageError: it does not.
    """
    _functions()


@functools.cache
def _functions() -> tuple[_Function, _Function]:
    """Return `aux_data(blob, array, number)` and `SparseUpdateChunk(array, other)`, tried on two arrays."""
    try:
        aux_data = LIBRARY_KEEPING_LOCK["_ZNK5mxnet7NDArray8aux_dataEm"]
        update_chunk = LIBRARY_KEEPING_LOCK["_ZNK5mxnet7NDArray17SparseUpdateChunkERKS0_"]
    except AttributeError as error:
        raise _no_support() from error
    aux_data.restype = update_chunk.restype = None
    aux_data.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    update_chunk.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    array, made = empty_rows((5, 2), np.float32, 1), empty_rows((5, 2), np.float32, 2)
    update_chunk(array.handle.value, made.handle.value)
    blob = _Blob()
    aux_data(ctypes.addressof(blob), array.handle.value, 0)
    if (blob.dimensions, blob.sides[0]) != (1, 2):
        raise _no_support()
    return aux_data, update_chunk


def _no_support() -> UsageError:
    return UsageError(
        f"row_sparse arrays need a build of MXNet like the 1.9.1 wheels, and this one ({mx.__version__}) is "
        "another: pip install --force-reinstall mxnet==1.9.1, or use dense arrays (tostype('default'))"
    )
