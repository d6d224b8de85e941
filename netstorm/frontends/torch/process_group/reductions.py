"""Calls that reduce: all-reduce, reduce, reduce-scatter, barrier."""

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
from netstorm.frontends.torch.process_group.elements import reduction_of
from netstorm.frontends.torch.process_group.member import after_all
from netstorm.frontends.torch.process_group.sparse import SparseSums
from netstorm.frontends.torch.process_group.staging import staged
from netstorm.frontends.torch.process_group.work import CallWork
from netstorm.protocol.codecs import Reduction
from netstorm.protocol.messages import LossTerms

__all__ = ["Reductions"]


@methods_raise_torch_errors
class Reductions(Calls):
    """The calls that reduce, with PyTorch's names and arguments."""

    _sparse: SparseSums

    def allreduce(self, tensors: Tensors, options: Any = None) -> CallWork:
        """Reduce a tensor over all ranks, in place."""
        self._check_open()
        tensor = only(tensors, "all_reduce")
        op = _op(options)
        if tensor.layout is not torch.strided:
            return self._sparse.all_reduce(tensor, op, timeout_of(options))
        memory = staged(tensor)
        exchange = self._exchanges.all_reduce(memory.host, reduction_of(op))
        return self._member.call(exchange, [tensor], timeout_of(options), (memory,))

    def allreduce_with_priority(self, tensor: Tensor, priority: int, *, average: bool = False) -> CallWork:
        """Sum a tensor over all ranks, or average it, in place; sums of higher priority overtake others."""
        self._check_open()
        memory = staged(tensor)
        reduction = Reduction.AVERAGE if average else Reduction.SUM
        exchange = self._exchanges.all_reduce(memory.host, reduction, priority)
        return self._member.call(exchange, [tensor], timeout_of(None), (memory,))

    def allreduce_with_loss(self, kept: Tensor, result: Tensor, terms: LossTerms, priority: int) -> CallWork:
        """Sum `kept` over all ranks into `result`, maybe without what comes too late. `kept`, which is dense
        and on the CPU, then has what was not counted of it, and zeros elsewhere.
        """
        self._check_open()
        memory = staged(result, read=False)
        exchange = self._exchanges.sum_with_loss(kept, memory.host, terms, priority)
        return self._member.call(exchange, [result], timeout_of(None), (memory,))

    def allreduce_coalesced(self, tensors: Tensors, options: Any = None) -> CallWork:
        """Reduce several tensors over all ranks, each in place."""
        self._check_open()
        op = _op(options)
        work = self._member.work(
            f"all_reduce_coalesced of {len(tensors)} tensors", list(tensors), timeout_of(options)
        )
        done = after_all(len(tensors), work.finish)
        for tensor in tensors:
            memory = staged(tensor)
            exchange = self._exchanges.all_reduce(memory.host, reduction_of(op))
            self._member.begin(exchange, done, (memory,))
        return work

    def reduce(self, tensors: Tensors, options: Any = None) -> CallWork:
        """Reduce a tensor over all ranks to one of them, in place; it is unchanged elsewhere."""
        self._check_open()
        tensor = only(tensors, "reduce")
        op, root = _op(options), self._root(options)
        memory = staged(tensor, write=root == self._member.rank)
        exchange = self._exchanges.reduce(memory.host, reduction_of(op), root)
        return self._member.call(exchange, [tensor], timeout_of(options), (memory,))

    def reduce_scatter(self, outputs: Tensors, inputs: list[list[Tensor]], options: Any = None) -> CallWork:
        """Reduce the tensors of each place of a list, and give the result to the rank of that place."""
        self._check_open()
        if len(inputs) != 1:
            raise UsageError(f"reduce_scatter: {len(inputs)} lists of tensors; give one")
        return self._scattered(only(outputs, "reduce_scatter"), inputs[0], options)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any = None) -> CallWork:
        """Reduce a tensor, and give each rank an equal part of the result."""
        self._check_open()
        return self._scattered(output, self._parts(source, output, "reduce_scatter_tensor"), options)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> CallWork:
        """Reduce several tensors, and give each rank an equal part of each result."""
        self._check_open()
        op = _op(options)
        work = self._member.work(
            f"reduce_scatter_tensor_coalesced of {len(outputs)} tensors", list(outputs), timeout_of(options)
        )
        done = after_all(len(outputs), work.finish)
        for output, source in zip(outputs, inputs, strict=True):
            target, given = staged(output, read=False), staged(source, write=False)
            parts = self._parts(given.host, target.host, "reduce_scatter_tensor")
            exchange = self._exchanges.reduce_scatter(target.host, parts, reduction_of(op))
            self._member.begin(exchange, done, (target, given))
        return work

    # PyTorch's older names of the same, which its C++ code and other libraries still call.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> CallWork:
        """Wait until all ranks have come here."""
        self._check_open()
        return self._member.call(self._exchanges.barrier(), [], timeout_of(opts))

    def _scattered(self, output: Tensor, inputs: Tensors, options: Any) -> CallWork:
        op = _op(options)
        target = staged(output, read=False)
        given = [staged(tensor, write=False) for tensor in inputs]
        exchange = self._exchanges.reduce_scatter(
            target.host, [each.host for each in given], reduction_of(op)
        )
        return self._member.call(exchange, [output], timeout_of(options), (target, *given))

    def _parts(self, whole: Tensor, part: Tensor, name: str) -> list[Tensor]:
        """Return the equal parts of a tensor, one for each rank."""
        size = self._member.size
        if whole.dtype != part.dtype or whole.numel() != part.numel() * size:
            raise UsageError(
                f"{name}: {whole.dtype} {tuple(whole.shape)} and {part.dtype} {tuple(part.shape)} do not fit "
                f"together: one must be {size} times the other, for {size} ranks, and of the same type"
            )
        return list(whole.contiguous().reshape(-1).chunk(size)) if part.numel() else [part] * size


def _op(options: Any) -> Any:
    return torch.distributed.ReduceOp.SUM if options is None else options.reduceOp
