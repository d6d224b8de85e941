"""Tensors as flat NumPy arrays: without a copy where a tensor's memory permits it.

A tensor that is contiguous, on the CPU and dense is used as it is. Any other is copied to a staging tensor,
whose result is copied back when the call is done.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from netstorm.frontends.torch.process_group.elements import type_name
from netstorm.kvstore.forms import STORED
from netstorm.protocol.codecs import Element

__all__ = ["Staged", "array_of", "described"]


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
