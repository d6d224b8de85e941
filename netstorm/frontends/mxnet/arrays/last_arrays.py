"""The arrays that a key was pushed from and pulled to last: a script uses the same ones in each step.

What was found out about an array once need not be found out again: that it fits its key and is dense, and
how to copy it fastest. An array is known by its handle, a Python object of its own, which stands for one
shape and type as long as it lives. Keeping the handle keeps nothing of the array.
"""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.frontends.mxnet.arrays.dense_copy import CopyOut, is_on_gpu, queue_dense_copy
from netstorm.frontends.mxnet.engine.binding import NDArray

__all__ = ["LastArrays"]


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
