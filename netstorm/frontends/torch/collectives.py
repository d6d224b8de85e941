"""PyTorch's calls: its tensors as the exchanges of a group (`kvstore.exchanges`), and its messages."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import torch

from netstorm.errors import Closed, UsageError
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.member import (
    CallWork,
    ProcessGroupMember,
    methods_are_never_compiled,
)
from netstorm.frontends.torch.tensors import (
    NAMES,
    Staged,
    array_of,
    described,
    element_of,
    reduction_name,
    reduction_of,
    staged,
    type_name,
)
from netstorm.kvstore.calls import GroupCalls, TensorExchange
from netstorm.kvstore.exchanges import CollectiveExchanges, reduced
from netstorm.kvstore.forms import Segments
from netstorm.kvstore.operations import PointToPointOperation
from netstorm.kvstore.options import loss_terms
from netstorm.kvstore.process.group_member import after_all
from netstorm.kvstore.process.runtime import CompletionThread
from netstorm.protocol.codecs import Element, Reduction
from netstorm.protocol.messages import LossTerms

__all__ = ["CopyCalls", "Exchanges", "Messages", "Reductions", "SparseSums"]


class Exchanges:
    """The exchanges of one member of a group. Tensors are on the CPU, dense and contiguous
    (`memory.staged`).
    """

    def __init__(self, rank: int, size: int) -> None:
        self._size: Final = size
        self._of_group: Final = CollectiveExchanges(rank, size)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, priority: int = 0) -> TensorExchange:
        """Reduce a tensor in place; a higher `priority` goes first on every link."""
        text = f"all_reduce({NAMES[reduction]}) of {described(tensor)}"
        element = element_of(tensor.dtype, reduction)
        array = array_of(tensor, element)
        return reduced(text, array, array, reduction, element, priority=priority)

    def sum_with_loss(
        self, kept: torch.Tensor, result: torch.Tensor, terms: LossTerms, priority: int, said: str = ""
    ) -> TensorExchange:
        """Sum `kept` into `result`, maybe without late contributions, which stay in `kept`."""
        text = f"all_reduce(SUM) of {described(kept)} with {said or terms}"
        element = element_of(kept.dtype, Reduction.SUM)
        source, target = array_of(kept, element), array_of(result, element)
        exchange = reduced(text, source, target, Reduction.SUM, element, priority=priority)
        return msgspec.structs.replace(exchange, loss=terms)

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> TensorExchange:
        """Reduce a tensor in place at `root`; it stays as it is elsewhere."""
        text = f"reduce({NAMES[reduction]}) to rank {root} of {described(tensor)}"
        element = element_of(tensor.dtype, reduction)
        array = array_of(tensor, element)
        return self._of_group.reduce(text, array, array, reduction, element, root=root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> TensorExchange:
        """Copy a tensor of `root` to everybody's."""
        text = f"broadcast from rank {root} of {described(tensor)}"
        return self._of_group.broadcast(text, array_of(tensor, Element.BYTES), root)

    def barrier(self) -> TensorExchange:
        """Wait for everybody: a sum of one byte."""
        one = array_of(torch.zeros(1, dtype=torch.uint8), Element.UINT8)
        return reduced("barrier()", one, one, Reduction.SUM, Element.UINT8)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, name: str = "all_gather"
    ) -> TensorExchange:
        """Copy every rank's tensor to all; `outputs` by rank."""
        self._check(outputs, mine, name)
        text = f"{name} of {described(mine)}"
        return self._of_group.all_gather(text, array_of(mine, Element.BYTES), _bytes(outputs))

    def gather(self, outputs: Sequence[torch.Tensor] | None, mine: torch.Tensor, root: int) -> TensorExchange:
        """Copy every rank's tensor to `root`, where `outputs` are, by rank."""
        if outputs is not None:
            self._check(outputs, mine, "gather")
        text = f"gather to rank {root} of {described(mine)}"
        targets = None if outputs is None else _bytes(outputs)
        return self._of_group.gather(text, array_of(mine, Element.BYTES), targets, root)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
    ) -> TensorExchange:
        """Copy each tensor of `root`, where `inputs` are, to the rank of its place."""
        if inputs is not None:
            self._check(inputs, output, "scatter")
        text = f"scatter from rank {root} of {described(output)}"
        given = None if inputs is None else _bytes(inputs)
        return self._of_group.scatter(text, array_of(output, Element.BYTES), given, root)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> TensorExchange:
        """Reduce the tensors of each place, and give the result to the rank of that place."""
        self._check(inputs, output, "reduce_scatter")
        element = element_of(output.dtype, reduction)
        return self._of_group.reduce_scatter(
            f"reduce_scatter({NAMES[reduction]}) of {described(output)}",
            array_of(output, element),
            tuple(array_of(tensor, element) for tensor in inputs),
            reduction,
            element,
        )

    def _check(self, tensors: Sequence[torch.Tensor], like: torch.Tensor, name: str) -> None:
        """Check that there is one tensor a rank, all of the same size.

        Raises:
            UsageError: there is not.
        """
        if len(tensors) != self._size:
            raise UsageError(f"{name}: {len(tensors)} tensors for {self._size} ranks; give one a rank")
        for rank, tensor in enumerate(tensors):
            if tensor.dtype != like.dtype or tensor.numel() != like.numel():
                raise UsageError(
                    f"{name}: the tensor of rank {rank} is {type_name(tensor.dtype)} {tuple(tensor.shape)}, "
                    f"and this rank's {type_name(like.dtype)} {tuple(like.shape)}: all must be of one type "
                    "and size (all_to_all takes tensors of different sizes)"
                )


def _bytes(tensors: Sequence[torch.Tensor]) -> Segments:
    return tuple(array_of(tensor, Element.BYTES) for tensor in tensors)


# What the three kinds of calls of a process group have in common.

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[torch.Tensor]
Class = TypeVar("Class", bound=type)

_UNSET: Final = timedelta(0)


class Calls:
    """This process in the group, for those who make calls."""

    _member: ProcessGroupMember
    _exchanges: Exchanges
    _is_closed: bool
    _why_closed: str

    @property
    def loss_terms(self) -> LossTerms | None:
        """How the process's settings treat late gradients; None: all are waited for."""
        return loss_terms(self._member.runtime.settings)

    def _check_open(self) -> None:
        """Check that the group can be used.

        Raises:
            Closed: it has been destroyed.
        """
        if self._is_closed:
            raise Closed(f"process group {self._member.name!r} {self._why_closed}")

    def _root(self, options: Any) -> int:
        """Return the root that options of a call name."""
        return self._checked(int(options.rootRank))

    def _checked(self, rank: int) -> int:
        """Return a rank within the group.

        Raises:
            UsageError: there is no such rank.
        """
        size = self._member.size
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of a group of {size}: expected 0 to {size - 1}")
        return rank


def timeout_of(options: object) -> timedelta:
    """Return the time-out that options of a call bring; 0: none."""
    timeout = getattr(options, "timeout", _UNSET)
    return max(_UNSET, timeout)


def only(tensors: Tensors, name: str) -> Tensor:
    """Return the one tensor that PyTorch passes in a list.

    Raises:
        UsageError: there are none, or several.
    """
    if len(tensors) != 1:
        raise UsageError(f"{name}: {len(tensors)} tensors; the netstorm backend takes one at a time")
    return tensors[0]


def methods_raise_torch_errors(calls: Class) -> Class:
    """Decorate a class: its public methods raise errors that are also `DistBackendError`s, and are not
    compiled.
    """
    for name, member in list(vars(calls).items()):
        if not name.startswith("_") and inspect.isfunction(member):
            setattr(calls, name, raises_torch_errors(member))
    return methods_are_never_compiled(calls)


# Calls that copy: broadcast, all-gather, gather, scatter.


@methods_raise_torch_errors
class CopyCalls(Calls):
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


# All-reduce of sparse tensors (COO): indices and values of all ranks, which each rank adds up alike.
#
# It takes three steps, the later of which depend on the sizes that the first finds out. They run on a
# thread of their own, one call after the other, so they are in the same order at all ranks.


class SparseSums:
    """The sparse all-reduces of one member of a group."""

    def __init__(self, member: ProcessGroupMember, exchanges: Exchanges) -> None:
        self._member: Final = member
        self._exchanges: Final = exchanges
        self._calls: GroupCalls | None = None
        self._thread: Final = CompletionThread("netstorm-sparse")

    def all_reduce(self, tensor: torch.Tensor, op: Any, timeout: timedelta) -> CallWork:
        """Begin to sum a sparse tensor over all ranks, in place.

        Raises:
            NotImplementedError: another layout than COO, or another reduction than SUM.
        """
        if tensor.layout is not torch.sparse_coo:
            raise NotImplementedError(
                f"the netstorm backend sums sparse tensors in COO layout; this one is {tensor.layout}: call "
                "to_sparse_coo() or to_dense() first"
            )
        if reduction_name(op) != "SUM":
            raise NotImplementedError(
                f"the netstorm backend has SUM of sparse tensors, not {reduction_name(op)}: call to_dense() "
                "first"
            )
        if self._calls is None:
            self._calls = self._member.calls("/sparse")
        work = self._member.work(f"all_reduce(SUM) of sparse {described(tensor)}", [tensor], timeout)
        self._thread.run(lambda: self._run(tensor, work))
        return work

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _run(self, tensor: torch.Tensor, work: CallWork) -> None:
        try:
            with torch.no_grad():
                tensor.copy_(self._sum(tensor.detach().coalesce()))
        except Exception as error:  # noqa: BLE001 -- whatever it is, whoever waits must hear of it
            work.finish(error)
        else:
            work.finish(None)

    def _sum(self, mine: torch.Tensor) -> torch.Tensor:
        indices, values = mine.indices().cpu().contiguous(), mine.values().cpu().contiguous()
        counts = self._gather(torch.tensor([values.shape[0]], dtype=torch.int64))
        most = int(max(int(count) for count in counts))
        all_indices = self._gather(_padded(indices.t().contiguous(), most))
        all_values = self._gather(_padded(values, most))
        total = torch.sparse_coo_tensor(
            torch.cat([found[: int(n)] for found, n in zip(all_indices, counts, strict=True)]).t(),
            torch.cat([found[: int(n)] for found, n in zip(all_values, counts, strict=True)]),
            mine.shape,
        )
        return total.coalesce().to(mine.device)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank."""
        gathered = [torch.empty_like(mine) for _ in range(self._member.size)]
        ended = threading.Event()
        errors: list[Exception | None] = []

        def done(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        exchange = self._exchanges.all_gather(gathered, mine, "all_reduce of sparse tensors: all_gather")
        self._member.begin(exchange, done, calls=self._calls)
        ended.wait()  # the node ends every call, at the latest by NETSTORM_WAIT_TIMEOUT
        if errors[0] is not None:
            raise errors[0]
        return gathered


def _padded(rows: torch.Tensor, most: int) -> torch.Tensor:
    """Return a tensor with so many rows, the last of which mean nothing."""
    if rows.shape[0] == most:
        return rows
    longer = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype)
    longer[: rows.shape[0]] = rows
    return longer


# Calls that reduce: all-reduce, reduce, reduce-scatter, barrier.


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

    def allreduce_with_loss(
        self,
        kept: Tensor,
        result: Tensor,
        terms: LossTerms,
        priority: int,
        *,
        calls: GroupCalls | None = None,
        said: str = "",
    ) -> CallWork:
        """Sum `kept` over all ranks into `result`, maybe without what comes too late. `kept`, which is dense
        and on the CPU, then has what was not counted of it, and zeros elsewhere. `said` names the terms,
        if ranks may have different ones.
        """
        self._check_open()
        memory = staged(result, read=False)
        exchange = self._exchanges.sum_with_loss(kept, memory.host, terms, priority, said)
        return self._member.call(exchange, [result], timeout_of(None), (memory,), calls=calls)

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


# Messages between two ranks, and all-to-all, which is made of them.

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
