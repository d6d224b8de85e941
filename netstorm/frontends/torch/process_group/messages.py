"""Messages between two ranks, and all-to-all, which is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from netstorm.errors import UsageError
from netstorm.frontends.torch.process_group.calls import (
    Calls,
    Tensor,
    Tensors,
    methods_raise_torch_errors,
    only,
    timeout_of,
)
from netstorm.frontends.torch.process_group.memory import Staged, described
from netstorm.frontends.torch.process_group.staging import staged
from netstorm.frontends.torch.process_group.work import CallWork
from netstorm.kvstore.operations import PointToPointOperation

__all__ = ["Messages"]

_ALL_TO_ALL: Final = "/all_to_all"
"""Its messages are told from the program's by their channel."""


@methods_raise_torch_errors
class Messages(Calls):
    """Sends, receives and all-to-all, with PyTorch's names and arguments."""

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> CallWork:  # noqa: N803 -- PyTorch's name
        """Send a tensor to a rank."""
        self._check_open()
        tensor = only(tensors, "send")
        self._checked(dstRank)
        memory, what = staged(tensor, write=False), described(tensor)
        operation = self._member.send(memory, what, dstRank, tag)
        text = f"send to rank {dstRank} (tag {tag}) of {what}"
        return self._member.exchange_messages(text, [(operation, memory)], [tensor], timeout_of(None))

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> CallWork:  # noqa: N803 -- PyTorch's name
        """Receive a tensor from a rank."""
        return self._received(only(tensors, "recv"), self._checked(srcRank), tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> CallWork:
        """Receive a tensor from whichever rank's message comes first."""
        return self._received(only(tensors, "recv"), None, tag)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> CallWork:
        """Send a tensor to each rank and receive one from each; they may be of different sizes."""
        self._check_open()
        size = self._member.size
        if len(outputs) != size or len(inputs) != size:
            raise UsageError(
                f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs for {size} ranks; give one a "
                "rank"
            )
        targets = [staged(tensor, read=False) for tensor in outputs]
        given = [staged(tensor, write=False) for tensor in inputs]
        return self._exchanged(targets, given, list(outputs), options)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        options: Any = None,
    ) -> CallWork:
        """Send a part of a tensor to each rank and receive a part from each, along the first dimension."""
        self._check_open()
        target, given = staged(output, read=False), staged(source, write=False)
        if target.must_wait or given.must_wait:  # parts of one tensor of a GPU: each its own copy to the host
            targets = [staged(part, read=False) for part in self._split(output, output_splits, "output")]
            sources = [staged(part, write=False) for part in self._split(source, input_splits, "input")]
            return self._exchanged(targets, sources, [output], options)
        targets = [Staged(part) for part in self._split(target.host, output_splits, "output")]
        sources = [Staged(part, write=False) for part in self._split(given.host, input_splits, "input")]
        return self._exchanged(targets, sources, [output], options, whole=target)

    alltoall_base = all_to_all_single  # PyTorch's older name, which its C++ code still calls

    def _received(self, tensor: Tensor, source: int | None, tag: int) -> CallWork:
        self._check_open()
        memory, what = staged(tensor, read=False), described(tensor)
        operation = self._member.receive(memory, what, source, tag)
        origin = "any rank" if source is None else f"rank {source}"
        text = f"receive from {origin} (tag {tag}) of {what}"
        return self._member.exchange_messages(text, [(operation, memory)], [tensor], timeout_of(None))

    def _exchanged(
        self,
        targets: Sequence[Staged],
        sources: Sequence[Staged],
        result: list[Tensor],
        options: Any,
        whole: Staged | None = None,
    ) -> CallWork:
        """Begin to exchange messages with all ranks; `whole` is copied back when all are done."""
        member = self._member
        messages: list[tuple[PointToPointOperation, Staged]] = []
        for rank in range(member.size):
            target, source = targets[rank], sources[rank]
            # Empty ones, too: the other side may expect some values, or have some.
            what = described(source.tensor)
            messages.append((member.send(source, what, rank, 0, _ALL_TO_ALL), source))
            what = described(target.tensor)
            messages.append((member.receive(target, what, rank, 0, _ALL_TO_ALL), target))
        return member.exchange_messages("all_to_all", messages, result, timeout_of(options), whole)

    def _split(self, whole: Tensor, sizes: Sequence[int] | None, name: str) -> list[Tensor]:
        """Return a tensor's parts along its first dimension, one for each rank; no sizes: equal parts."""
        size = self._member.size
        rows = whole.shape[0] if whole.dim() else 0
        if not sizes:
            if rows % size:
                raise UsageError(
                    f"all_to_all_single: the {name} has {rows} rows, which {size} ranks cannot share "
                    f"equally; give {name}_split_sizes"
                )
            sizes = [rows // size] * size
        if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
            raise UsageError(
                f"all_to_all_single: {name}_split_sizes={list(sizes)}: expected {size} numbers, one a rank, "
                f"that add up to the {rows} rows of the {name}"
            )
        return list(torch.split(whole, list(sizes)))
