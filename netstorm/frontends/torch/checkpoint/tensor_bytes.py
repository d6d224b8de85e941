"""PyTorch's tensors as bytes. Types that NumPy lacks, such as bfloat16, are bytes like all others."""

from __future__ import annotations

import math
from typing import Final

import torch

from netstorm.checkpoint.checksums import checksum_number
from netstorm.checkpoint.tensors import Description, NumpyTensors
from netstorm.errors import CheckpointError, UsageError

__all__ = ["TorchTensors"]

_PREFIX: Final = "torch."
_KEEP: Final = "keep its full values as an ordinary tensor instead"


class TorchTensors:
    """Tensors on any device, and NumPy's arrays. Restored tensors are on the CPU."""

    KIND: Final = "torch"

    def __init__(self) -> None:
        self._numpy: Final = NumpyTensors()

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor, or an array."""
        return isinstance(value, torch.Tensor) or self._numpy.is_tensor(value)

    def describe(self, tensor: object, name: str) -> Description:
        """Describe a tensor."""
        if not isinstance(tensor, torch.Tensor):
            return self._numpy.describe(tensor, name)
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
            raise UsageError(
                f"{name} is a {type(tensor).__name__}, of which this rank may have a part alone: {_KEEP} "
                "(torch.distributed.checkpoint.state_dict has full_state_dict=True)"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UsageError(f"{name} is a sparse, quantised or meta tensor: {_KEEP}")
        return Description(
            self.KIND,
            str(tensor.dtype).removeprefix(_PREFIX),
            tuple(tensor.shape),
            tensor.numel() * tensor.element_size(),
        )

    def copy(self, tensor: object, begin: int, end: int, out: memoryview) -> None:
        """Copy some of its bytes; from a GPU only those."""
        if not isinstance(tensor, torch.Tensor):
            self._numpy.copy(tensor, begin, end, out)
            return
        torch.frombuffer(out, dtype=torch.uint8).copy_(_bytes(tensor)[begin:end])

    def checksum(self, tensor: object) -> int:
        """Return the CRC-32C of its bytes."""
        if not isinstance(tensor, torch.Tensor):
            return self._numpy.checksum(tensor)
        return checksum_number(_bytes(tensor).cpu().numpy().data)

    def restore(self, description: Description, data: memoryview) -> object:
        """Return a tensor, or an array."""
        if description.kind != self.KIND:
            return self._numpy.restore(description, data)
        dtype = getattr(torch, description.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"the checkpoint has a tensor of type {description.dtype!r}, which PyTorch "
                f"{torch.__version__} does not have"
            )
        if math.prod(description.shape) * dtype.itemsize != len(data):
            raise CheckpointError(f"the checkpoint has a tensor of {len(data)} bytes for {description}")
        if not data:
            return torch.empty(description.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(description.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order, without a copy if they are in that order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)
