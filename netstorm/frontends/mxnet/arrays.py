"""Staging buffers: the only arrays that the network reads and writes, and how values get in and out of them.

The network never touches an array of the user's. Such an array may be

* in oneDNN's blocked layout (a convolution's weight is, after a forward pass in predict mode). Asking for its
  memory inside an operation waits for a reordering of the array, which waits for the operation: a hang.
  MXNet's own copy knows all layouts, and what it writes is in the default one;
* on a GPU, where its address means nothing to us. The engine copies it to the host first. Where there are
  GPUs our memory is pinned, so that their copies need no intermediate buffer and do not block one another;
* a view of another array of the same operation, or freed or overwritten while the network still sends it.

A copy costs a pass over the memory in a thread of the engine: 3 ms for 40 MB, and some 100 ms the first time,
when the system has yet to provide the pages. So keep a StagingBuffer for as long as its key lives.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.dense_copy import CopyOut, queue_dense_copy
from netstorm.frontends.mxnet.arrays.last_arrays import LastArrays
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.engine.library import LIBRARY_KEEPING_LOCK, check_call

__all__ = ["StagingBuffer", "memory_of"]

_to_dlpack: Final = LIBRARY_KEEPING_LOCK["MXNDArrayToDLPack"]
_to_dlpack.restype = ctypes.c_int
_to_dlpack.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
_from_dlpack: Final = LIBRARY_KEEPING_LOCK["MXNDArrayFromDLPackEx"]
_from_dlpack.restype = ctypes.c_int
_from_dlpack.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.POINTER(mx.base.NDArrayHandle)]
_free_dlpack: Final = LIBRARY_KEEPING_LOCK["MXNDArrayCallDLPackDeleter"]
_free_dlpack.restype = ctypes.c_int
_free_dlpack.argtypes = [ctypes.c_void_p]


class StagingBuffer:
    """Host memory in the default layout under a variable of MXNet's engine.

    What is copied to and from it is dense and of its shape and type. `arguments.check_fits` has made sure of
    it; checking again would cost each push and pull 5 us.
    """

    __slots__ = ("_copies", "_is_plain", "array", "dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Allocate it; the contents are arbitrary.

        Args:
            shape: of the values.
            dtype: any that MXNet 1.9 has: float16, float32, float64, int8, int32, int64, uint8, bool.

        Raises:
            UsageError: a type that MXNet does not have.
        """
        self.shape: Final = tuple(shape)
        self.dtype: Final[np.dtype[np.generic]] = _known(dtype)
        with _any_shape(self.shape):
            self.array: Final[NDArray] = mx.nd.empty(self.shape, ctx=_host(), dtype=self.dtype)
        self._is_plain: Final = bool(self.shape) and all(self.shape)
        self._copies: CopyOut | None = None
        """Made for the first copy out."""

    @classmethod
    def like(cls, array: NDArray) -> StagingBuffer:
        """Return a new one with the shape and type of `array`, which may be on any device."""
        return cls(tuple(array.shape), array.dtype)

    def memory(self) -> memoryview:
        """Return the bytes, without a copy, for use between an operation's start and its completion.

        Never waits. The array's memory lives at least as long as the view.
        """
        return memory_of(self.array)

    @property
    def may_have_alias(self) -> bool:
        """Whether `alias` works: for ordinary memory, not for what a GPU's driver has pinned, and for arrays
        that are neither empty nor scalars (MXNet takes these for arrays of unknown shape).
        """
        return self._is_plain and bool(_host().device_type == "cpu")

    def alias(self) -> NDArray:
        """Return an array of the same memory under another variable of the engine; never waits.

        An operation that waits for one of the two does not wait for the other. The memory lives as long as
        either.
        """
        tensor, handle = ctypes.c_void_p(), mx.base.NDArrayHandle()
        check_call(_to_dlpack(self.array.handle, ctypes.byref(tensor)))
        check_call(_from_dlpack(tensor, False, ctypes.byref(handle)))  # takes the tensor
        return mx.nd.NDArray(handle)

    def copy_from(self, source: NDArray) -> None:
        """Queue a copy of `source`, on any device and in any layout, to this array; returns at once."""
        self._copy(source, self.array)

    def copy_to(self, out: NDArray) -> None:
        """Queue a copy of this array to `out`, on any device and in any layout; returns at once."""
        if not self._is_plain:
            self._copy(self.array, out)
            return
        if self._copies is None:
            self._copies = CopyOut(self.array)
        self._copies.queue_copy(out)

    def sum_of(self, sources: Sequence[NDArray], last: LastArrays | None = None) -> None:
        """Queue the sum of `sources`, one for each device, from left to right; returns at once.

        Args:
            sources: dense arrays of this buffer's shape and type.
            last: those of the key, where a single source is noted.

        Raises:
            UsageError: there are none, or several of type bool.
        """
        if not sources:
            raise UsageError("a sum needs at least one array")
        if last is not None and len(sources) == 1 and self._is_plain:
            last.queue_copy(sources[0], self.array)
            return
        self._copy(sources[0], self.array)
        if len(sources) > 1:
            if self.dtype == np.bool_:
                raise UsageError("MXNet does not add arrays of type bool; give one array, or another type")
            # Through a copy in the default layout: oneDNN's sum writes the layout that it finds in its
            # inputs.
            addend = StagingBuffer(self.shape, self.dtype)
            for source in sources[1:]:
                addend._copy(source, addend.array)
                with mx.autograd.pause(), _any_shape(self.shape):
                    mx.nd.elemwise_add(self.array, addend.array, out=self.array)

    def _copy(self, source: NDArray, target: NDArray) -> None:
        if self._is_plain:
            queue_dense_copy(source, target)
            return
        with _any_shape(self.shape):
            queue_dense_copy(source, target)


@functools.cache
def _host() -> mx.Context:
    """Return the context of staging buffers. Called late: looking for GPUs starts CUDA."""
    return mx.cpu_pinned() if mx.context.num_gpus() else mx.cpu()


def memory_of(array: NDArray) -> memoryview:
    """Return the bytes of a dense array on the host, without a copy and without waiting for anything.

    The caller is inside an operation on `array`, or knows otherwise that nobody writes it now.

    Raises:
        UsageError: the array is on a GPU or sparse, or in oneDNN's blocked layout now.
    """
    if array.context.device_type == "gpu" or array.stype != "default":
        raise UsageError(
            f"a {array.stype} array on {array.context} has no host memory to share; use a StagingBuffer"
        )
    tensor = ctypes.c_void_p()
    try:
        # MXNDArrayGetData waits for a reordering if the layout is blocked: inside an operation, for ever.
        # This fails.
        check_call(_to_dlpack(array.handle, ctypes.byref(tensor)))
    except mx.base.MXNetError as error:
        raise UsageError(
            f"an array of shape {tuple(array.shape)} is in oneDNN's blocked layout; use a StagingBuffer"
        ) from error
    try:
        address = ctypes.c_void_p.from_address(tensor.value or 0).value  # DLTensor.data is its first member
    finally:
        check_call(_free_dlpack(tensor))
    size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    if size == 0:
        return memoryview(bytearray())
    if address is None:
        raise UsageError(f"an array of shape {tuple(array.shape)} has no memory yet")
    block = (ctypes.c_ubyte * size).from_address(address)
    vars(block)["owner"] = array  # the view keeps the block alive, and the block the array
    return np.frombuffer(memoryview(block), dtype=np.uint8).data


def _known(dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    known = np.dtype(dtype)
    if known.type not in mx.nd.ndarray._DTYPE_NP_TO_MX:  # noqa: SLF001 -- the table is not exported
        raise UsageError(f"MXNet has no arrays of type {known}")
    return known


@contextmanager
def _any_shape(shape: tuple[int, ...]) -> Iterator[None]:
    """Scalars and empty arrays exist only in MXNet's NumPy mode; elsewhere () and 0 mean "not known yet"."""
    if shape and all(shape):
        yield
        return
    with mx.util.np_shape(True):
        yield
