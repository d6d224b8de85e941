"""Copies of dense arrays, as cheap as MXNet's C interface has them: through a local KVStore of one key.

A pull of MXNet's `local` store is the function `mxnet::CopyFromTo` and little else. A push to such a store
without an updater makes the store's value an alias of the array. So a push and a pull together queue a copy
between any layouts, on the engine, that is part of no autograd graph. The operator `_copyto` ends in the same
function, by way of attributes, shapes and 6 KB from the allocator. It takes twice the time, and more for the
first call after a pause, when glibc first sorts all memory that the engine's threads have freed meanwhile.

An array that is copied again and again has a store of its own (`CopyOut`), whose value stays its alias. A
copy is then the pull alone, in two fifths of the time.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.engine.library import LIBRARY_KEEPING_LOCK, check_call

__all__ = ["CopyOut", "is_on_gpu", "queue_dense_copy"]

_push: Final = LIBRARY_KEEPING_LOCK["MXKVStorePush"]
_pull: Final = LIBRARY_KEEPING_LOCK["MXKVStorePull"]
for _function in (_push, _pull):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

_KEY: Final = (ctypes.c_int * 1)(0)
_One: Final = ctypes.c_void_p * 1


class _Thread(threading.local):
    """One thread's store: between its push and its pull no other thread may push."""

    def __init__(self) -> None:
        self.store: Final = mx.kv.create("local")  # frees its handle when the thread ends
        self.handle: Final = self.store.handle
        self.nothing: Final = mx.nd.zeros((1,), ctx=mx.cpu())
        self.store.init(0, self.nothing)
        self.release: Final = _One(self.nothing.handle)


_thread: Final = _Thread()
_HAS_GPUS: Final = bool(mx.runtime.Features().is_enabled("CUDA"))


def is_on_gpu(array: NDArray) -> bool:
    """Return whether an array is on a GPU; costs nothing in a build of MXNet without CUDA."""
    return _HAS_GPUS and array.context.device_type == "gpu"


def queue_dense_copy(source: NDArray, target: NDArray) -> None:
    """Queue a copy between any devices and layouts; both arrays are dense, of one shape and of one type."""
    if is_on_gpu(source):
        # The store would copy it to a buffer of its key, which has one shape.
        with mx.autograd.pause():
            queue_copy(source, target)
        return
    thread = _thread
    handle = thread.handle
    check_call(_push(handle, 1, _KEY, _One(source.handle), 0))
    try:
        check_call(_pull(handle, 1, _KEY, _One(target.handle), 0))
    finally:
        _push(handle, 1, _KEY, thread.release, 0)  # the array may be freed before the next copy


class CopyOut:
    """A source of copies: one dense array on the host. Keeps the array's memory alive."""

    __slots__ = ("_handle", "_store")

    def __init__(self, source: NDArray) -> None:
        """Make it; takes some 20 us."""
        self._store: Final = mx.kv.create("local")
        self._handle: Final = self._store.handle
        # An array of another shape will do: a store without an updater does not compare shapes.
        self._store.init(0, _thread.nothing)
        check_call(_push(self._handle, 1, _KEY, _One(source.handle), 0))

    def queue_copy(self, target: NDArray) -> None:
        """Queue a copy to an array on any device and in any layout, of the same shape and type."""
        check_call(_pull(self._handle, 1, _KEY, _One(target.handle), 0))
