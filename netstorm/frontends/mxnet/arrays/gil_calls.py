"""The few calls into MXNet that every push and pull makes, without giving up Python's lock.

MXNet's own Python code gives the lock up at each call into its library, some ten times a push, and then waits
to get it back behind the I/O thread and the engine's threads. None of these calls blocks: they look at an
array, or queue an operation on the engine. So they keep the lock, and a push takes what it computes.

Where MXNet's own code makes them for us, in an optimiser, we give it functions that keep the lock: those that
look at an array for everybody, the one that queues an operation only within `keeping_lock`.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final, NamedTuple

import numpy as np

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray

__all__ = ["Kind", "is_dense", "keeping_lock", "kind_of", "queue_copy"]

_check: Final = mx.base.check_call
_library: Final = ctypes.PyDLL(mx.base._LIB._name)  # noqa: SLF001 -- the only handle there is

_shape: Final = _library["MXNDArrayGetShapeEx"]
_shape64: Final = _library["MXNDArrayGetShapeEx64"]
_dtype: Final = _library["MXNDArrayGetDType"]
_storage: Final = _library["MXNDArrayGetStorageType"]
_invoke: Final = _library["MXImperativeInvokeEx"]

_SHAPE_64: Final = bool(mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE"))
_ARRAY_TYPES: Final = [kind * length for kind in (ctypes.c_void_p, ctypes.c_char_p) for length in range(16)]
"""What handles and attributes are passed in. `ctypes` keeps a type like `c_void_p * 2` only as long as
somebody uses it: the call after a garbage collection would make each anew, at 20 us, and more after a pause.
"""

_DENSE: Final = 0  # mxnet::NDArrayStorageType::kDefaultStorage

_TYPES: Final = {
    code: np.dtype(kind)
    for code, kind in mx.nd.ndarray._DTYPE_MX_TO_NP.items()  # noqa: SLF001 -- the table is not exported
    if kind is not None
}


class Kind(NamedTuple):
    """What must be equal for one array to be copied to another."""

    dense: bool
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def kind_of(array: NDArray) -> Kind:
    """Return an array's shape and type, and whether it is dense."""
    handle = array.handle
    number = ctypes.c_int()
    dense = is_dense(array)
    _check(_dtype(handle, ctypes.byref(number)))
    dtype = _TYPES[number.value]
    if _SHAPE_64:
        sides64 = ctypes.POINTER(ctypes.c_int64)()
        _check(_shape64(handle, ctypes.byref(number), ctypes.byref(sides64)))
        return Kind(dense, tuple(sides64[: number.value]), dtype)
    sides = ctypes.POINTER(ctypes.c_int)()
    _check(_shape(handle, ctypes.byref(number), ctypes.byref(sides)))
    return Kind(dense, tuple(sides[: number.value]), dtype)


def is_dense(array: NDArray) -> bool:
    """Return whether an array is neither row-sparse nor of compressed rows."""
    number = ctypes.c_int()
    _check(_storage(array.handle, ctypes.byref(number)))
    return number.value == _DENSE


def queue_copy(source: NDArray, target: NDArray) -> None:
    """Queue a copy, between any devices and layouts; both arrays are of one kind."""
    count = ctypes.c_int(1)
    inputs, outputs = (ctypes.c_void_p * 1)(source.handle), (ctypes.c_void_p * 1)(target.handle)
    pointer = ctypes.cast(outputs, ctypes.POINTER(ctypes.c_void_p))
    storage = ctypes.POINTER(ctypes.c_int)()
    _check(
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


class keeping_lock:  # noqa: N801 -- used like a function; a generator would cost each push another frame
    """Let this thread keep the lock while it queues operations by MXNet's own functions.

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
_invoke_without_lock: Final = mx.base._LIB.MXImperativeInvokeEx  # noqa: SLF001 -- see above


def _invoke_either_way(*arguments: Any) -> int:
    return int(_invoke(*arguments) if _thread.keeps else _invoke_without_lock(*arguments))


def _teach_mxnet() -> None:
    library = mx.base._LIB  # noqa: SLF001 -- see above
    library.MXNDArrayGetStorageType = _storage
    library.MXNDArrayGetDType = _dtype
    library.MXNDArrayGetShapeEx = _shape
    library.MXNDArrayGetShapeEx64 = _shape64
    library.MXNDArrayGetContext = _library["MXNDArrayGetContext"]
    library.MXImperativeInvokeEx = _invoke_either_way


def _operator(name: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))  # noqa: SLF001 -- see above
    return handle


_COPY: Final = _operator("_copyto")
_teach_mxnet()
