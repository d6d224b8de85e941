"""Tensors as flat NumPy arrays, pinned memory for those of a GPU, and PyTorch's types as NetStorm's.

A tensor that is contiguous, on the CPU and dense is used as it is. Any other is copied to a staging tensor,
whose result is copied back when the call is done.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from netstorm.errors import UsageError
from netstorm.kvstore.forms import STORED
from netstorm.protocol.codecs import Element, Reduction, can_reduce

__all__ = [
    "GPUS",
    "NAMES",
    "Staged",
    "array_of",
    "described",
    "element_of",
    "pinned_like",
    "reduction_name",
    "reduction_of",
    "staged",
    "stream_of",
    "type_name",
]


class Staged:
    """A tensor of the user's, and where its values are while a call runs.

    Attributes:
        tensor: the user's.
        host: dense, contiguous, on the CPU; the user's own if that is so.
        device: the tensor's, if it is not the CPU.
        must_wait: the values are still on their way to `host`.
    """

    must_wait = False
    device: torch.device | None = None

    def __init__(self, tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> None:
        """Make a tensor of the CPU ready to be read and written by another thread.

        Args:
            tensor: the user's.
            read: its present values are needed.
            write: it gets a result.
        """
        self._write = write
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.host: torch.Tensor = self.tensor
        if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype)
            if read:
                self.host.copy_(self.tensor)

    @property
    def is_copy(self) -> bool:
        """Whether the values must be copied back."""
        return self._write and self.host is not self.tensor

    def wait_until_read(self) -> None:
        """Wait until the values are in `host`."""

    def copy_back(self) -> None:
        """Give the result to the user's tensor."""
        self.tensor.copy_(self.host)

    def order_current_stream(self) -> None:
        """Let the current stream of the tensor's device wait for the result."""


class _Memory:
    """A tensor's memory, as NumPy takes it: an array of it refers to this object, and so to the tensor.

    PyTorch's own views and `numpy()` go through its dispatcher, which takes several times as long.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes // dtype.itemsize,),
            "typestr": dtype.str,
            "version": 3,
        }


def array_of(tensor: torch.Tensor, element: Element) -> npt.NDArray[Any]:
    """Return the memory of a contiguous CPU tensor as a flat array, of the type in which elements are
    stored.
    """
    dtype = STORED[element]
    return np.asarray(_Memory(tensor, dtype)) if tensor.nbytes else np.empty(0, dtype)


def described(tensor: torch.Tensor) -> str:
    """Return a tensor's type and shape as error messages show them: equal texts mean equal types and
    shapes.
    """
    return _described(tensor.dtype, tensor.shape)


@functools.lru_cache(maxsize=1024)
def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{type_name(dtype)} {tuple(shape)}"


# PyTorch's types and reductions as NetStorm's.

_ELEMENTS: Final = {
    torch.float16: Element.FLOAT16,
    torch.bfloat16: Element.BFLOAT16,
    torch.float32: Element.FLOAT32,
    torch.float64: Element.FLOAT64,
    torch.int8: Element.INT8,
    torch.int16: Element.INT16,
    torch.int32: Element.INT32,
    torch.int64: Element.INT64,
    torch.uint8: Element.UINT8,
    torch.uint16: Element.UINT16,
    torch.uint32: Element.UINT32,
    torch.uint64: Element.UINT64,
    torch.bool: Element.BOOL,
    torch.complex64: Element.FLOAT32,
    torch.complex128: Element.FLOAT64,
}
"""A complex number is reduced as two real ones, which is right for sums alone."""

NAMES: Final = {
    Reduction.SUM: "SUM",
    Reduction.AVERAGE: "AVG",
    Reduction.PRODUCT: "PRODUCT",
    Reduction.MINIMUM: "MIN",
    Reduction.MAXIMUM: "MAX",
    Reduction.AND: "BAND",
    Reduction.OR: "BOR",
    Reduction.XOR: "BXOR",
}
"""What PyTorch calls each reduction."""

_REDUCTIONS: Final = {int(getattr(dist.ReduceOp, name)): reduction for reduction, name in NAMES.items()}
"""By number: PyTorch makes a new object of a reduction whenever it is read, and compares them slowly."""


def type_name(dtype: torch.dtype) -> str:
    """Return a type as error messages show it."""
    return str(dtype).removeprefix("torch.")


def reduction_name(op: Any) -> str:
    """Return a reduction as error messages show it, such as "SUM"."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def reduction_of(op: Any) -> Reduction:
    """Return a reduction.

    Raises:
        NotImplementedError: there is no such reduction here; the message says what to use.
    """
    reduction = _REDUCTIONS.get(int(getattr(op, "op", op)))
    if reduction is None:
        raise NotImplementedError(
            f"the netstorm backend has no ReduceOp.{reduction_name(op)}; use one of "
            f"{', '.join(NAMES.values())}"
        )
    return reduction


@functools.lru_cache(maxsize=256)
def element_of(dtype: torch.dtype, reduction: Reduction) -> Element:
    """Return the type of a tensor's elements, if they can be reduced so.

    Raises:
        NotImplementedError: they cannot; the message says what can.
    """
    if reduction is Reduction.COPY:
        return Element.BYTES
    element = _ELEMENTS.get(dtype)
    if element is None:
        raise NotImplementedError(
            f"the netstorm backend cannot reduce tensors of {type_name(dtype)}; convert them to one of "
            f"{', '.join(type_name(known) for known in _ELEMENTS)}"
        )
    linear = reduction in {Reduction.SUM, Reduction.AVERAGE}
    if not can_reduce(reduction, element) or (dtype.is_complex and not linear):
        raise NotImplementedError(
            f"the netstorm backend has no {reduction.name.lower()} of {type_name(dtype)}; "
            + ("complex numbers have SUM and AVG" if dtype.is_complex else _hint(reduction))
        )
    return element


def _hint(reduction: Reduction) -> str:
    if reduction is Reduction.AVERAGE:
        return "convert truth values to numbers, or use SUM (any) or PRODUCT (all)"
    return "bitwise reductions take whole numbers: view the tensor as an integer type"


# Tensors of a GPU: their values travel through pinned memory, on a stream of their own.
#
# The copy to the host waits for the kernels that the program's current stream has queued, and for nothing
# that it queues afterwards. So backward goes on while a gradient is copied. The copy back is ordered by an
# event before what the program queues after `wait`.

GPUS: Final = {"cuda"}
"""Types of devices whose tensors are taken. Tests add one that any machine has."""

_streams: Final[dict[torch.device, Any]] = {}


def stream_of(device: torch.device) -> Any:
    """Return the stream on which values are copied from and to a GPU."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.get_device_module(device).Stream(device)
    return stream


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host, for a tensor's values, that a GPU reads and writes by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class StagedOnGpu(Staged):
    """A GPU's tensor, and its values in pinned memory."""

    must_wait = True

    def __init__(self, tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> None:
        """Begin to copy a tensor to the host; see `Staged`."""
        self._write = write
        self.tensor = tensor.detach()
        self.device = tensor.device
        self._gpus: Final[Any] = torch.get_device_module(tensor.device)
        self._stream: Final = stream_of(tensor.device)
        self.host = pinned_like(tensor)
        self._stream.wait_stream(self._gpus.current_stream(tensor.device))
        if read:
            with self._gpus.stream(self._stream):
                self.host.copy_(self.tensor, non_blocking=True)
        # The allocator must not give the tensor's memory to anybody else before the copies are done.
        self.tensor.record_stream(self._stream)
        self._event = self._stream.record_event()

    def wait_until_read(self) -> None:
        """Wait until the values are in `host`."""
        self._event.synchronize()

    def copy_back(self) -> None:
        """Begin to give the result to the user's tensor."""
        with self._gpus.stream(self._stream):
            self.tensor.copy_(self.host, non_blocking=True)
        self._event = self._stream.record_event()

    def order_current_stream(self) -> None:
        """Let the current stream of the tensor's device wait for the result."""
        self._gpus.current_stream(self.device).wait_event(self._event)


# Makes a tensor's values reachable for the node, wherever they are.


def staged(tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> Staged:
    """Return a tensor ready for a call.

    Args:
        tensor: dense; of the CPU or a CUDA device.
        read: its present values are needed.
        write: it gets a result.

    Raises:
        NotImplementedError: a tensor of another device, or that is not dense.
        UsageError: it gets a result, and several of its elements are one place in memory.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"the netstorm backend takes sparse tensors (COO) in all_reduce with SUM alone; this one is "
            f"{tensor.layout}: call to_dense() first"
        )
    if write and not tensor.is_contiguous() and 0 in _strides_of_many(tensor):
        raise UsageError(
            f"a result for {described(tensor)} with strides {tensor.stride()}: several of its elements are "
            "one place in memory, as expand() makes it; call clone() first"
        )
    if tensor.is_cpu:
        return Staged(tensor, read=read, write=write)
    if tensor.device.type in GPUS:
        return StagedOnGpu(tensor, read=read, write=write)
    raise NotImplementedError(
        f"the netstorm backend takes tensors of the CPU and of CUDA devices; this one is on {tensor.device}"
    )


def _strides_of_many(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions that have several elements."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
