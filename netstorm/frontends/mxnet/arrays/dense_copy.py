"""Copies of dense arrays, as cheap as MXNet's C interface has them: through a local KVStore of one key.

A pull of MXNet's `local` store is the function `mxnet::CopyFromTo` and little else, and a push to one without
an updater makes the store's value an alias of the array. So push and pull together queue a copy between any
layouts, on the engine, that is part of no autograd graph. The operator `_copyto` ends in the same function,
by way of attributes, shapes and 6 KB from the allocator. That is twice the time, and worse for the first call
after a pause: glibc sorts all that the engine's threads have freed meanwhile before it gives out that much.

An array that is copied time and again has a store of its own (`CopyOut`), whose value stays its alias: a copy
is the pull alone, at two fifths of the time.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

from netstorm.frontends.mxnet.arrays.gil_calls import queue_copy
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray

__all__ = ["CopyIn", "CopyOut", "queue_dense_copy"]

_check: Final = mx.base.check_call
_library: Final = ctypes.PyDLL(mx.base._LIB._name)  # noqa: SLF001 -- keeps Python's lock: neither call waits
_push: Final = _library["MXKVStorePush"]
_pull: Final = _library["MXKVStorePull"]
for _function in (_push, _pull):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

_KEY: Final = (ctypes.c_int * 1)(0)
_One: Final = ctypes.c_void_p * 1


class _Thread(threading.local):
    """One thread's store: between its push and its pull nobody else may push."""

    def __init__(self) -> None:
        self.store: Final[Any] = mx.kv.create("local")  # frees its handle when the thread ends
        self.handle: Final = self.store.handle
        self.nothing: Final = mx.nd.zeros((1,), ctx=mx.cpu())
        self.store.init(0, self.nothing)
        self.release: Final = _One(self.nothing.handle)


_thread: Final = _Thread()
_MAY_BE_ELSEWHERE: Final = bool(mx.runtime.Features().is_enabled("CUDA"))


def queue_dense_copy(source: NDArray, target: NDArray) -> None:
    """Queue a copy between any devices and layouts; both arrays are dense, of one shape and of one type."""
    if _MAY_BE_ELSEWHERE and source.context.device_type == "gpu":
        # The store would copy it to a buffer of the key's, which is of one shape.
        with mx.autograd.pause():
            queue_copy(source, target)
        return
    thread = _thread
    handle = thread.handle
    _check(_push(handle, 1, _KEY, _One(source.handle), 0))
    try:
        _check(_pull(handle, 1, _KEY, _One(target.handle), 0))
    finally:
        _push(handle, 1, _KEY, thread.release, 0)  # the array may be freed before the next copy


class CopyOut:
    """Where copies of one dense array on the host come from. Keeps its memory."""

    __slots__ = ("_handle", "_store")

    def __init__(self, source: NDArray) -> None:
        """Takes some 20 us."""
        self._store: Final[Any] = mx.kv.create("local")
        self._handle: Final = self._store.handle
        # Of another shape, for which a store without updaters does not care.
        self._store.init(0, _thread.nothing)
        _check(_push(self._handle, 1, _KEY, _One(source.handle), 0))

    def queue_copy(self, target: NDArray) -> None:
        """Queue a copy to an array on any device and in any layout, of the same shape and type."""
        _check(_pull(self._handle, 1, _KEY, _One(target.handle), 0))


class CopyIn:
    """Where copies to one place come from: a script pushes the same gradient in each step.

    An array that is copied twice in a row gets an outlet, which keeps its memory until another is copied.
    """

    __slots__ = ("_handle", "_outlet")

    def __init__(self) -> None:
        self._handle: object = None
        """The last source's. It is a Python object of its own, and to keep it keeps nothing of the array."""
        self._outlet: CopyOut | None = None

    def queue_copy(self, source: NDArray, target: NDArray) -> None:
        """Do what `queue_dense_copy` does."""
        if source.handle is not self._handle:
            self._handle, self._outlet = source.handle, None
            queue_dense_copy(source, target)
            return
        if self._outlet is None:
            if _MAY_BE_ELSEWHERE and source.context.device_type == "gpu":
                queue_dense_copy(source, target)
                return
            self._outlet = CopyOut(source.detach())  # an alias of the array itself would keep its graph
        self._outlet.queue_copy(target)
