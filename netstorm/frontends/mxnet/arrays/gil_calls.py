"""The few calls into MXNet that every push and pull makes, without giving up Python's lock.

MXNet's own Python code gives up the lock at each call into its library, some ten times a push. Each time it
waits behind the I/O thread and the engine's threads to get the lock back. None of these calls blocks: they
read a property of an array, or queue an operation on the engine. So here they keep the lock, and a push takes
as long as it computes.

In an optimizer MXNet's own code makes such calls. There it gets functions that keep the lock: those that read
a property always, the one that queues an operation only within `KeepingLock`.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final, NamedTuple

import numpy as np

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.engine.library import LIBRARY, LIBRARY_KEEPING_LOCK, check_call

__all__ = ["KeepingLock", "Kind", "is_dense", "kind_of", "queue_copy"]

_shape: Final = LIBRARY_KEEPING_LOCK["MXNDArrayGetShapeEx"]
_shape64: Final = LIBRARY_KEEPING_LOCK["MXNDArrayGetShapeEx64"]
_dtype: Final = LIBRARY_KEEPING_LOCK["MXNDArrayGetDType"]
_storage: Final = LIBRARY_KEEPING_LOCK["MXNDArrayGetStorageType"]
_invoke: Final = LIBRARY_KEEPING_LOCK["MXImperativeInvokeEx"]

_SHAPE_64: Final = bool(mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE"))
_ARRAY_TYPES: Final = [kind * length for kind in (ctypes.c_void_p, ctypes.c_char_p) for length in range(16)]
"""The types of arguments: arrays of handles and attributes. `ctypes` forgets a type like `c_void_p * 2` when
nobody uses it, and making it anew takes 20 us or more. This list keeps them."""

_DENSE: Final = 0  # mxnet::NDArrayStorageType::kDefaultStorage

_TYPES: Final = {
    code: np.dtype(kind)
    for code, kind in mx.nd.ndarray._DTYPE_MX_TO_NP.items()  # noqa: SLF001 -- the table is not exported
    if kind is not None
}


class Kind(NamedTuple):
    """The properties that two arrays must share for one to be copied to the other."""

    dense: bool
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def kind_of(array: NDArray) -> Kind:
    """Return an array's shape and type, and whether it is dense."""
    handle = array.handle
    number = ctypes.c_int()
    dense = is_dense(array)
    check_call(_dtype(handle, ctypes.byref(number)))
    dtype = _TYPES[number.value]
    if _SHAPE_64:
        sides64 = ctypes.POINTER(ctypes.c_int64)()
        check_call(_shape64(handle, ctypes.byref(number), ctypes.byref(sides64)))
        return Kind(dense, tuple(sides64[: number.value]), dtype)
    sides = ctypes.POINTER(ctypes.c_int)()
    check_call(_shape(handle, ctypes.byref(number), ctypes.byref(sides)))
    return Kind(dense, tuple(sides[: number.value]), dtype)


def is_dense(array: NDArray) -> bool:
    """Return whether an array is neither row-sparse nor of compressed rows."""
    number = ctypes.c_int()
    check_call(_storage(array.handle, ctypes.byref(number)))
    return number.value == _DENSE


def queue_copy(source: NDArray, target: NDArray) -> None:
    """Queue a copy, between any devices and layouts; both arrays are of one kind."""
    count = ctypes.c_int(1)
    inputs, outputs = (ctypes.c_void_p * 1)(source.handle), (ctypes.c_void_p * 1)(target.handle)
    pointer = ctypes.cast(outputs, ctypes.POINTER(ctypes.c_void_p))
    storage = ctypes.POINTER(ctypes.c_int)()
    check_call(
        _invoke(
            _COPY,
            1,
            inputs,
            ctypes.byref(count),
            ctypes.byref(pointer),
            0,
            None,
            None,
            ctypes.byref(storage),
        )
    )


class KeepingLock:
    """While it is open, this thread keeps the lock when MXNet's own functions queue operations.

    None of them may be one that waits for values to know the shape of its result: it would wait for ever.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _thread.keeps = True

    def __exit__(self, *_: object) -> None:
        _thread.keeps = False


class _Thread(threading.local):
    keeps = False


_thread: Final = _Thread()
_invoke_without_lock: Final = LIBRARY.MXImperativeInvokeEx


def _invoke_either_way(*arguments: object) -> int:
    return int(_invoke(*arguments) if _thread.keeps else _invoke_without_lock(*arguments))


def _replace_mxnets_functions() -> None:
    replaced = {
        "MXNDArrayGetStorageType": _storage,
        "MXNDArrayGetDType": _dtype,
        "MXNDArrayGetShapeEx": _shape,
        "MXNDArrayGetShapeEx64": _shape64,
        "MXNDArrayGetContext": LIBRARY_KEEPING_LOCK["MXNDArrayGetContext"],
        "MXImperativeInvokeEx": _invoke_either_way,
    }
    for name, function in replaced.items():
        setattr(LIBRARY, name, function)  # where MXNet's Python code finds it


def _operator(name: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    check_call(LIBRARY.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return handle


_COPY: Final = _operator("_copyto")
_replace_mxnets_functions()
