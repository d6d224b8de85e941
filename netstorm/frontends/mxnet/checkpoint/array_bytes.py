"""MXNet's arrays as bytes of a checkpoint, and row-sparse ones as trees of dense ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from netstorm.checkpoint.checksums import checksum_number
from netstorm.checkpoint.tensors import Description, NumpyTensors
from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import NDArray

__all__ = ["MXNetArrays", "as_tree", "from_tree"]

_ROWS: Final = "row_sparse"


def as_tree(value: object) -> object:
    """Return arrays, or tuples and lists of them, with row-sparse arrays as dictionaries of dense ones."""
    if isinstance(value, mx.nd.sparse.RowSparseNDArray):
        return {"stype": _ROWS, "shape": tuple(value.shape), "indices": value.indices, "data": value.data}
    if isinstance(value, (tuple, list)):
        return type(value)(as_tree(item) for item in value)
    return value


def from_tree(tree: object) -> object:
    """Return what `as_tree` was given, from a tree with NumPy's arrays; new arrays of MXNet's on the host."""
    if isinstance(tree, np.ndarray):
        made = mx.nd.empty(tree.shape, dtype=tree.dtype)
        made[:] = tree
        return made
    if isinstance(tree, Mapping) and tree.get("stype") == _ROWS:
        indices, data = from_tree(tree["indices"]), from_tree(tree["data"])
        return mx.nd.sparse.row_sparse_array(
            (data, indices), shape=tree["shape"], dtype=tree["data"].dtype, ctx=mx.cpu()
        )
    if isinstance(tree, (tuple, list)):
        return type(tree)(from_tree(item) for item in tree)
    if tree is None or isinstance(tree, (int, float, str)):
        return tree
    raise CheckpointError(f"the checkpoint has a {type(tree).__name__} where MXNet's arrays are expected")


class MXNetArrays:
    """Arrays on any device, and NumPy's. They are restored as NumPy's."""

    def __init__(self) -> None:
        self._numpy: Final = NumpyTensors()

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is an array."""
        return isinstance(value, mx.nd.NDArray) or self._numpy.is_tensor(value)

    def describe(self, tensor: object, name: str) -> Description:
        """Describe an array."""
        if not isinstance(tensor, mx.nd.NDArray):
            return self._numpy.describe(tensor, name)
        if tensor.stype != "default":
            raise UsageError(f"{name} is a {tensor.stype} array: give dense ones (tostype('default'))")
        dtype, shape = np.dtype(tensor.dtype), tuple(tensor.shape)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return Description(NumpyTensors.KIND, dtype.name, shape, size)

    def copy(self, tensor: object, begin: int, end: int, out: memoryview) -> None:
        """Copy some of its bytes, after all that is queued for it."""
        self._numpy.copy(_on_host(tensor), begin, end, out)

    def checksum(self, tensor: object) -> int:
        """Return the CRC-32C of its bytes."""
        return checksum_number(np.ascontiguousarray(_on_host(tensor)).reshape(-1).view(np.uint8).data)

    def restore(self, description: Description, data: memoryview) -> object:
        """Return an array of NumPy's."""
        return self._numpy.restore(description, data)


def _on_host(tensor: object | NDArray) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if isinstance(tensor, mx.nd.NDArray):
        tensor = tensor.asnumpy()
    assert isinstance(tensor, np.ndarray)
    return tensor
