"""Calls that copy: broadcast, all-gather, gather, scatter."""

from __future__ import annotations

from typing import Any

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
from netstorm.frontends.torch.process_group.elements import type_name
from netstorm.frontends.torch.process_group.member import after_all
from netstorm.frontends.torch.process_group.staging import staged
from netstorm.frontends.torch.process_group.work import CallWork

__all__ = ["Copies"]


@methods_raise_torch_errors
class Copies(Calls):
    """The calls that copy, with PyTorch's names and arguments."""

    def broadcast(self, tensors: Tensors, options: Any) -> CallWork:
        """Copy a tensor of one rank to all."""
        self._check_open()
        tensor = only(tensors, "broadcast")
        root = self._root(options)
        mine = root == self._member.rank
        memory = staged(tensor, read=mine, write=not mine)
        exchange = self._exchanges.broadcast(memory.host, root)
        return self._member.call(exchange, [tensor], timeout_of(options), (memory,), giver=root)

    def allgather(self, outputs: list[list[Tensor]], inputs: Tensors, options: Any = None) -> CallWork:
        """Copy every rank's tensor to all."""
        self._check_open()
        mine = only(inputs, "all_gather")
        if len(outputs) != 1:
            raise UsageError(f"all_gather: {len(outputs)} lists of tensors; give one")
        return self._gathered(outputs[0], mine, options)

    def all_gather_single(self, output: Tensor, mine: Tensor, options: Any = None) -> CallWork:
        """Copy every rank's tensor to all, into one tensor, by rank."""
        self._check_open()
        target, given = staged(output, read=False), staged(mine, write=False)
        exchange = self._exchanges.all_gather(self._places(target.host, given.host), given.host)
        return self._member.call(exchange, [output], timeout_of(options), (target, given))

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: Tensors, options: Any = None
    ) -> CallWork:
        """Copy several tensors of every rank to all: `outputs` has a list for each rank."""
        self._check_open()
        lists = [list(each) for each in zip(*outputs, strict=True)] if outputs else []
        if len(lists) != len(inputs):
            raise UsageError(
                f"all_gather_coalesced: {len(inputs)} tensors, and lists of {len(lists)} results"
            )
        work = self._member.work(
            f"all_gather_coalesced of {len(inputs)} tensors",
            [tensor for each in outputs for tensor in each],
            timeout_of(options),
        )
        done = after_all(len(inputs), work.finish)
        for results, tensor in zip(lists, inputs, strict=True):
            targets, given = [staged(each, read=False) for each in results], staged(tensor, write=False)
            exchange = self._exchanges.all_gather([each.host for each in targets], given.host)
            self._member.begin(exchange, done, (*targets, given))
        return work

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> CallWork:
        """Copy several tensors of every rank to all, each into one tensor, by rank."""
        self._check_open()
        work = self._member.work(
            f"all_gather_into_tensor_coalesced of {len(inputs)} tensors", list(outputs), timeout_of(options)
        )
        done = after_all(len(inputs), work.finish)
        for output, tensor in zip(outputs, inputs, strict=True):
            target, given = staged(output, read=False), staged(tensor, write=False)
            exchange = self._exchanges.all_gather(self._places(target.host, given.host), given.host)
            self._member.begin(exchange, done, (target, given))
        return work

    # PyTorch's older names of the same, which its C++ code and other libraries still call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: Tensors, options: Any) -> CallWork:
        """Copy every rank's tensor to one rank."""
        self._check_open()
        root = self._root(options)
        given = staged(only(inputs, "gather"), write=False)
        targets = None
        if root == self._member.rank:
            if len(outputs) != 1:
                raise UsageError(f"gather: {len(outputs)} lists of tensors at the receiving rank; give one")
            targets = [staged(tensor, read=False) for tensor in outputs[0]]
        exchange = self._exchanges.gather(
            None if targets is None else [each.host for each in targets], given.host, root
        )
        result = [] if targets is None else list(outputs[0])
        return self._member.call(exchange, result, timeout_of(options), (*(targets or ()), given))

    def scatter(self, outputs: Tensors, inputs: list[list[Tensor]], options: Any) -> CallWork:
        """Copy each tensor of one rank to the rank of its place."""
        self._check_open()
        root = self._root(options)
        output = only(outputs, "scatter")
        target = staged(output, read=False)
        given = None
        if root == self._member.rank:
            if len(inputs) != 1:
                raise UsageError(f"scatter: {len(inputs)} lists of tensors at the sending rank; give one")
            given = [staged(tensor, write=False) for tensor in inputs[0]]
        exchange = self._exchanges.scatter(
            target.host, None if given is None else [each.host for each in given], root
        )
        return self._member.call(
            exchange, [output], timeout_of(options), (target, *(given or ())), giver=root
        )

    def _gathered(self, outputs: Tensors, mine: Tensor, options: Any) -> CallWork:
        targets, given = [staged(each, read=False) for each in outputs], staged(mine, write=False)
        exchange = self._exchanges.all_gather([each.host for each in targets], given.host)
        return self._member.call(exchange, list(outputs), timeout_of(options), (*targets, given))

    def _places(self, whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the equal parts of a contiguous tensor, one for each rank."""
        size = self._member.size
        if whole.dtype != part.dtype or whole.numel() != part.numel() * size:
            raise UsageError(
                f"all_gather_into_tensor: an output of {type_name(whole.dtype)} {tuple(whole.shape)} for an "
                f"input of {type_name(part.dtype)} {tuple(part.shape)}: it must be {size} times the input, "
                f"for {size} ranks, and of the same type"
            )
        return list(whole.reshape(-1).chunk(size)) if part.numel() else [part] * size
