"""MXNet's arrays: what is checked, copied and handed to the network.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.compression.sparse import Rows
from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import LIBRARY, LIBRARY_KEEPING_LOCK, NDArray, check_call
from netstorm.kvstore.forms import Key
from netstorm.protocol.frames import Buffer, StagedValues

__all__ = [
    "ArrayKind",
    "CopyOut",
    "Group",
    "KeepingLock",
    "LastArrays",
    "StagingBuffer",
    "array_of",
    "check_dense",
    "check_fits",
    "check_supported",
    "empty_rows",
    "filled_rows",
    "grouped",
    "is_dense",
    "kind_of",
    "memory_of",
    "paired_with_row_ids",
    "queue_copy",
    "queue_dense_copy",
    "replace_rows",
    "rows_of",
]


# Staging buffers: the only arrays that the network reads and writes, and how values get in and out of them.

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

    __slots__ = ("_copies", "_is_plain", "_values", "array", "dtype", "is_shared", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        memory: Callable[[int], Buffer | None] = lambda _: None,
    ) -> None:
        """Allocate it; the contents are arbitrary.

        Args:
            shape: of the values.
            dtype: any that MXNet 1.9 has: float16, float32, float64, int8, int32, int64, uint8, bool.
            memory: returns so many bytes that neighbours can read; None: MXNet's own memory does as well.
                Asked for floats on the host only.

        Raises:
            UsageError: a type that MXNet does not have.
        """
        self.shape: Final = tuple(shape)
        self.dtype: Final[np.dtype[np.generic]] = _known(dtype)
        self._is_plain: Final = bool(self.shape) and all(self.shape)
        shared = None
        if self.may_have_alias and np.issubdtype(self.dtype, np.floating):
            shared = memory(math.prod(self.shape) * self.dtype.itemsize)
        with _any_shape(self.shape):
            self.array: Final[NDArray] = (
                mx.nd.empty(self.shape, ctx=_host(), dtype=self.dtype)
                if shared is None
                else mx.nd.from_numpy(np.frombuffer(shared, self.dtype).reshape(self.shape))
            )
        self.is_shared: Final = shared is not None
        """Neighbours can read it."""
        self._copies: CopyOut | None = None
        """Made for the first copy out."""
        self._values: npt.NDArray[np.generic] | None = None
        """The memory, once it was asked for: what is copied here is in the default layout, so it never moves.
        """

    @classmethod
    def like(cls, array: NDArray) -> StagingBuffer:
        """Return a new one with the shape and type of `array`, which may be on any device."""
        return cls(tuple(array.shape), array.dtype)

    def memory(self) -> memoryview:
        """Return the bytes, without a copy, for use between an operation's start and its completion.

        Never waits. The array's memory lives at least as long as the view.
        """
        return memory_of(self.array)

    def values(self) -> npt.NDArray[np.generic]:
        """Return `memory` as what a rank contributes to a round: flat, of the buffer's type."""
        if self._values is None:
            values = np.frombuffer(self.memory(), self.dtype)
            self._values = values.view(StagedValues) if self.is_shared else values
        return self._values

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


def array_of(values: npt.NDArray[np.generic], shape: tuple[int, ...]) -> NDArray:
    """Return a new array on the host with these values, in this shape: a copy, without waiting for anything.

    Raises:
        UsageError: a type that MXNet does not have.
    """
    dtype = _known(values.dtype)
    if not shape or not all(shape):
        return mx.nd.array(values.reshape(shape), ctx=_HOST, dtype=dtype)
    made = mx.nd.empty(shape, ctx=_HOST, dtype=dtype)
    np.frombuffer(memory_of(made), dtype)[:] = values.reshape(-1)  # no one else uses the array
    return made


def _known(dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    checked = np.dtype(dtype)
    if checked.type not in mx.nd.ndarray._DTYPE_NP_TO_MX:  # noqa: SLF001 -- the table is not exported
        raise UsageError(f"MXNet has no arrays of type {checked}")
    return checked


@contextmanager
def _any_shape(shape: tuple[int, ...]) -> Iterator[None]:
    """Scalars and empty arrays exist only in MXNet's NumPy mode; elsewhere () and 0 mean "not known yet"."""
    if shape and all(shape):
        yield
        return
    with mx.util.np_shape(True):
        yield


# The few calls into MXNet that every push and pull makes, without giving up Python's lock.
#
# MXNet's own Python code gives up the lock at each call into its library, some ten times a push. Each time it
# waits behind the I/O thread and the engine's threads to get the lock back. None of these calls blocks: they
# read a property of an array, or queue an operation on the engine. So here they keep the lock, and a push
# takes as long as it computes.
#
# In an optimizer MXNet's own code makes such calls. There it gets functions that keep the lock: those that
# read a property always, the one that queues an operation only within `KeepingLock`.

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


class ArrayKind(NamedTuple):
    """The properties that two arrays must share for one to be copied to the other."""

    dense: bool
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def kind_of(array: NDArray) -> ArrayKind:
    """Return an array's shape and type, and whether it is dense."""
    handle = array.handle
    number = ctypes.c_int()
    dense = is_dense(array)
    check_call(_dtype(handle, ctypes.byref(number)))
    dtype = _TYPES[number.value]
    if _SHAPE_64:
        sides64 = ctypes.POINTER(ctypes.c_int64)()
        check_call(_shape64(handle, ctypes.byref(number), ctypes.byref(sides64)))
        return ArrayKind(dense, tuple(sides64[: number.value]), dtype)
    sides = ctypes.POINTER(ctypes.c_int)()
    check_call(_shape(handle, ctypes.byref(number), ctypes.byref(sides)))
    return ArrayKind(dense, tuple(sides[: number.value]), dtype)


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
        _lock_use.keeps = True

    def __exit__(self, *_: object) -> None:
        _lock_use.keeps = False


class _LockUse(threading.local):
    keeps = False


_lock_use: Final = _LockUse()
_invoke_without_lock: Final = LIBRARY.MXImperativeInvokeEx


def _invoke_either_way(*arguments: object) -> int:
    return int(_invoke(*arguments) if _lock_use.keeps else _invoke_without_lock(*arguments))


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


# Copies of dense arrays, as cheap as MXNet's C interface has them: through a local KVStore of one key.
#
# A pull of MXNet's `local` store is the function `mxnet::CopyFromTo` and little else. A push to such a store
# without an updater makes the store's value an alias of the array. So a push and a pull together queue a copy
# between any layouts, on the engine, that is part of no autograd graph. The operator `_copyto` ends in the
# same function, by way of attributes, shapes and 6 KB from the allocator. It takes twice the time, and more
# for the first call after a pause, when glibc first sorts all memory that the engine's threads have freed
# meanwhile.
#
# An array that is copied again and again has a store of its own (`CopyOut`), whose value stays its alias. A
# copy is then the pull alone, in two fifths of the time.

_store_push: Final = LIBRARY_KEEPING_LOCK["MXKVStorePush"]
_store_pull: Final = LIBRARY_KEEPING_LOCK["MXKVStorePull"]
for _function in (_store_push, _store_pull):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

_STORE_KEY: Final = (ctypes.c_int * 1)(0)
_One: Final = ctypes.c_void_p * 1


class _CopyStore(threading.local):
    """One thread's store: between its push and its pull no other thread may push."""

    def __init__(self) -> None:
        self.store: Final = mx.kv.create("local")  # frees its handle when the thread ends
        self.handle: Final = self.store.handle
        self.nothing: Final = mx.nd.zeros((1,), ctx=mx.cpu())
        self.store.init(0, self.nothing)
        self.release: Final = _One(self.nothing.handle)


_copy_store: Final = _CopyStore()
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
    thread = _copy_store
    handle = thread.handle
    check_call(_store_push(handle, 1, _STORE_KEY, _One(source.handle), 0))
    try:
        check_call(_store_pull(handle, 1, _STORE_KEY, _One(target.handle), 0))
    finally:
        _store_push(handle, 1, _STORE_KEY, thread.release, 0)  # the array may be freed before the next copy


class CopyOut:
    """A source of copies: one dense array on the host. Keeps the array's memory alive."""

    __slots__ = ("_handle", "_store")

    def __init__(self, source: NDArray) -> None:
        """Make it; takes some 20 us."""
        self._store: Final = mx.kv.create("local")
        self._handle: Final = self._store.handle
        # An array of another shape will do: a store without an updater does not compare shapes.
        self._store.init(0, _copy_store.nothing)
        check_call(_store_push(self._handle, 1, _STORE_KEY, _One(source.handle), 0))

    def queue_copy(self, target: NDArray) -> None:
        """Queue a copy to an array on any device and in any layout, of the same shape and type."""
        check_call(_store_pull(self._handle, 1, _STORE_KEY, _One(target.handle), 0))


# The arrays that a key was pushed from and pulled to last: a script uses the same ones in each step.
#
# What was found out about an array once need not be found out again: that it fits its key and is dense, and
# how to copy it fastest. An array is known by its handle, a Python object of its own, which stands for one
# shape and type as long as it lives. Keeping the handle keeps nothing of the array.


class LastArrays:
    """Those of one key. Only single arrays that fit the key are noted; one of several is forgotten."""

    __slots__ = ("_copies", "pulled", "pushed")

    def __init__(self) -> None:
        self.pushed: object = None
        """Handle of the last array that was pushed."""
        self.pulled: object = None
        """Handle of the last array that was pulled to."""
        self._copies: CopyOut | None = None
        """Of the array that was pushed last, if it was pushed twice in a row."""

    def have(self, arrays: Sequence[NDArray]) -> bool:
        """Return whether `arrays` is one array that is known to fit."""
        if len(arrays) != 1:
            return False
        handle = arrays[0].handle
        return handle is self.pushed or handle is self.pulled

    def queue_copy(self, source: NDArray, target: NDArray) -> None:
        """Do what `queue_dense_copy` does, and note that `source` was pushed.

        An array that is pushed twice in a row gets a `CopyOut`. Its memory lives until another is pushed.
        """
        if source.handle is not self.pushed:
            self.pushed, self._copies = source.handle, None
            queue_dense_copy(source, target)
            return
        if self._copies is None:
            if is_on_gpu(source):
                queue_dense_copy(source, target)
                return
            self._copies = CopyOut(source.detach())  # an alias of the array itself would keep its graph
        self._copies.queue_copy(target)


# The memory of row-sparse arrays, inside operations of MXNet's engine, where nothing may wait.
#
# How many rows such an array has is known only when the operation that writes it is done. MXNet's C API
# returns the number by copying in an operation of its own (`MXNDArrayGetAuxNDArray`: "this function
# blocks"), which inside an operation on the same array waits for ever. But the wheels export the C++
# functions that MXNet's own operators use:
#
# * `NDArray::aux_data(0)` returns the address and number of the row numbers;
# * `NDArray::SparseUpdateChunk` gives an array the memory of another one, however many rows that has. MXNet's
#   custom operators write their sparse results in this way, with as many rows as there happen to be.
#
# So nothing blocks, neither the script's thread nor an engine's. The rest has a C API that does not wait: the
# values are found by `MXNDArrayGetData`, and memory for a number of rows is made by
# `MXNDArrayCreateSparseEx`.

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


# The arguments of MXNet's KVStore: keys and values, one or a list, with one array or one for each device.

Group = tuple[int | str, list[NDArray]]
"""A key and its arrays, one for each device."""

_NDArray = mx.nd.NDArray


def grouped(key: object, value: object, what: str) -> list[Group]:
    """Return each key once, in order of appearance, with all of its arrays.

    Args:
        key: int or str, or a list of them. A list may name a key several times, once for each device.
        value: for a single key an NDArray or a list of them; for a list of keys a list of those.
        what: the method, for error messages.

    Raises:
        UsageError: keys of a wrong type or of two types, different numbers of keys and values, no array, or
            something that is no array.
    """
    if not isinstance(key, (list, tuple)):  # most calls have one key
        return [(_key(key, what), _arrays(value, key, what))]
    groups: dict[int | str, list[NDArray]] = {}
    for user_key, arrays in _pairs(key, value, what):
        groups.setdefault(user_key, []).extend(arrays)
    return list(groups.items())


def _pairs(key: object, value: object, what: str) -> list[Group]:
    """Return each key, as often as it is named, with its arrays; the errors are those of `grouped`."""
    if not isinstance(key, (list, tuple)):
        return [(_key(key, what), _arrays(value, key, what))]
    if not isinstance(value, (list, tuple)) or len(value) != len(key):
        count = len(value) if isinstance(value, (list, tuple)) else 1
        raise UsageError(
            f"{what} of {len(key)} keys with {count} values; give one value (or list of arrays) a key"
        )
    if len({isinstance(user_key, str) for user_key in key}) > 1:
        raise UsageError(f"{what}: keys must be all int or all str, not a mixture: {list(key)[:5]}")
    return [
        (_key(user_key, what), _arrays(arrays, user_key, what))
        for user_key, arrays in zip(key, value, strict=True)
    ]


def paired_with_row_ids(
    key: object, out: object, row_ids: object
) -> list[tuple[int | str, list[NDArray], list[NDArray]]]:
    """Return what a `row_sparse_pull` asks for: each key, as often as it is named, its outs, and the row
    numbers for each of these.

    Raises:
        UsageError: outs or row numbers are missing, are of the wrong kind, or their counts differ.
    """
    what = "row_sparse_pull"
    if out is None or row_ids is None:
        raise UsageError(f"{what} needs out, the arrays to write to, and row_ids, the numbers of their rows")
    paired = _pairs(key, out, what)
    numbers = _row_ids(row_ids, what)
    count = sum(len(arrays) for _, arrays in paired)
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count:
        raise UsageError(f"{what}: {len(numbers)} row_ids for {count} outs; give one, or one for each")
    remaining = iter(numbers)
    for user_key, arrays in paired:
        for array in arrays:
            if array.stype != "row_sparse":
                raise UsageError(
                    f"{what} of key {user_key!r} to a {array.stype} array; out must be row_sparse: make it "
                    "with mx.nd.sparse.zeros('row_sparse', shape)"
                )
    return [(user_key, arrays, [next(remaining) for _ in arrays]) for user_key, arrays in paired]


def _row_ids(row_ids: object, what: str) -> list[NDArray]:
    numbers: list[NDArray] = []
    for given in row_ids if isinstance(row_ids, (list, tuple)) else [row_ids]:
        for ids in given if isinstance(given, (list, tuple)) else [given]:
            if not isinstance(ids, _NDArray) or not kind_of(ids).dense:
                raise UsageError(f"{what}: row_ids must be dense NDArrays, not {type(ids).__name__}")
            numbers.append(ids)
    return numbers


def check_dense(arrays: Sequence[NDArray], key: Key, what: str) -> None:
    """Check that all arrays are dense.

    Raises:
        UsageError: one is not.
    """
    for array in arrays:
        if not kind_of(array).dense:
            raise UsageError(
                f"{what}, key {key.name!r}, with a {array.stype} array: only dense arrays go with it; call "
                "tostype('default')"
            )


def check_fits(arrays: Sequence[NDArray], key: Key, what: str) -> None:
    """Check that arrays can be pushed to, or pulled from, a key.

    Raises:
        UsageError: an array is sparse, but not row-sparse.
        KeyMismatch: an array has another shape or type than the key; the message has both.
    """
    for array in arrays:
        kind = kind_of(array)
        if not kind.dense and array.stype != "row_sparse":
            raise UsageError(
                f"{what} of key {key.name!r} with a {array.stype} array: it must be dense or row_sparse: "
                "call tostype('row_sparse') or tostype('default')"
            )
        if kind.shape != key.spec.shape or kind.dtype != key.dtype:
            raise KeyMismatch(
                f"{what} of key {key.name!r}: the array is {kind.shape} {kind.dtype}, the key "
                f"was initialised as {key.spec.shape} {key.spec.dtype}"
            )


def _key(key: object, what: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise UsageError(f"{what}: a key must be int or str, not {type(key).__name__} ({key!r})")
    return key


def _arrays(value: object, key: object, what: str) -> list[NDArray]:
    if isinstance(value, _NDArray):
        return [value]
    arrays: list[NDArray] = []
    for array in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(array, _NDArray):
            raise UsageError(
                f"{what} of key {key!r} with {type(array).__name__}; "
                "it must be an mxnet NDArray or a list of them"
            )
        arrays.append(array)
    if not arrays:
        raise UsageError(f"{what} of key {key!r} with an empty list of arrays")
    return arrays
