"""`Group`: the ranks of a job, for programs that have their values in NumPy arrays.

import netstorm
import numpy as np

with netstorm.Group() as group:
    mean = group.allreduce(np.full(3, group.rank), "mean")
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeAlias, overload

import msgspec
import numpy as np

from netstorm.addresses import split_host_port
from netstorm.checkpoint.format import NumpyTensors, pack, take_apart, unpack
from netstorm.errors import BarrierTimeout, Closed, SettingsError, UsageError, WaitTimeout
from netstorm.frontends.numpy.arrays import (
    Array,
    Target,
    Tree,
    describe,
    element_of,
    flat,
    leaves,
    ready_to_read,
    reduction_of,
    with_leaves,
)
from netstorm.frontends.numpy.future import GroupFuture
from netstorm.kvstore.calls import CallPositions, Position, TensorExchange
from netstorm.kvstore.exchanges import CollectiveExchanges, reduced
from netstorm.kvstore.operations import Done, PointToPointOperation
from netstorm.kvstore.process.elastic import fetch_state, offer_state, wait_for_enough_nodes
from netstorm.kvstore.process.group_member import GroupMember, after_all
from netstorm.kvstore.process.runtime import Runtime, before_finish, leave_job, runtime_of_this_process
from netstorm.kvstore.process.step_report import StepReport
from netstorm.protocol.codecs import Element, Reduction
from netstorm.settings import Settings, child_environment, foreign_variable

__all__ = ["Group", "Op"]


Op: TypeAlias = Literal["sum", "mean", "product", "min", "max"]


class _ArrayLike(Protocol):
    """What NumPy makes an array of, such as an array of JAX."""

    def __array__(self) -> Array: ...


Leaf: TypeAlias = np.ndarray[Any, Any] | np.generic | complex | _ArrayLike
"""Also `int`, `float` and `bool`."""


@dataclass(frozen=True, slots=True)
class _ReadyCall:
    """A collective call of one array, checked and ready."""

    exchange: TensorExchange
    result: Callable[[], Any]
    giver: int | None = None
    """The rank whose values everybody gets; the call fails without them."""


# The job of this process, which its groups share. A node leaves the job with its last group, and forwards for
# others until all have left.


@dataclass(slots=True)
class _JoinedJob:
    runtime: Runtime
    positions: CallPositions
    namespace: int
    made: int = 0
    """How many groups have been made: all ranks make as many, in the same order."""
    open: int = 0


@dataclass(slots=True)
class _OpenGroups:
    lock: threading.Lock = field(default_factory=threading.Lock)
    job: _JoinedJob | None = None


_process: Final = _OpenGroups()


class _Member(GroupMember):
    live_ranks = "group.members says who is in it"


def _join(arguments: Mapping[str, Any]) -> tuple[_JoinedJob, _Member]:
    """Return the job of this process, which the first group joins, and this process in a new group."""
    with _process.lock:
        job = _process.job
        given = [name for name, value in arguments.items() if value is not None]
        if job is None:
            runtime = runtime_of_this_process(_settings(**arguments), framework="NumPy")
            positions = CallPositions(later=runtime.node.needs_state)
            job = _process.job = _JoinedJob(runtime, positions, runtime.open_namespace())
        elif given:
            raise UsageError(
                f"Group({', '.join(f'{name}=' for name in given)}...): this process is in a job already, as "
                f"rank {job.runtime.rank}: leave the arguments out, or close() its other groups first"
            )
        name = f"numpy {job.made}"
        job.made += 1
        job.open += 1
        ranks = range(job.runtime.size)
        return job, _Member(
            name, ranks, runtime=job.runtime, namespace=job.namespace, positions=job.positions
        )


def _leave(job: _JoinedJob) -> None:
    with _process.lock:
        job.open -= 1
        if job.open == 0 and _process.job is job:
            _process.job = None
            leave_job()


def _settings(
    *, scheduler: str | None, rank: int | None, size: int | None, job: str | None, site: str | None
) -> Settings:
    """Return the settings of a group's arguments and of the environment.

    Raises:
        SettingsError: a wrong value.
        UsageError: nobody has named a scheduler.
    """
    overrides: dict[str, Any] = {"rank": rank, "num_workers": size, "job": job, "site": site}
    if scheduler is not None:
        try:
            overrides["scheduler_host"], overrides["scheduler_port"] = split_host_port(scheduler)
        except ValueError as error:
            raise SettingsError(f"scheduler={scheduler!r}: {error}") from None
    environment = child_environment()  # as this process has it
    for name, own, others in (
        ("rank", "NETSTORM_RANK", "RANK"),
        ("num_workers", "DMLC_NUM_WORKER", "WORLD_SIZE"),
    ):
        text = foreign_variable(others)  # that of other launchers
        if overrides[name] is None and not environment.get(own) and text:
            if not (text.isascii() and text.isdecimal()):
                raise SettingsError(f"{others}={text!r}: expected a whole number")
            overrides[name] = int(text)
    settings = Settings.from_environment(environment, **overrides)
    if {settings.source("scheduler_host"), settings.source("scheduler_port")} == {"default"}:
        raise UsageError(
            "Group(): no scheduler is named: start the program with `netstorm launch -n 3 -- python "
            "PROGRAM.py`; or start `netstorm scheduler`, and name it in DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT or as Group(scheduler='HOST:PORT')"
        )
    return settings


class Group:
    """All ranks of a job. Every rank makes the same calls in the same order, with arrays of equal types and
    shapes; calls that differ are an error at all ranks, which names both.

    The job is that of the environment, as `netstorm launch` sets it; arguments win. The first group of a
    process joins the job and waits until all ranks have come. A program may make further ones: each numbers
    its calls by itself, so two threads need two groups.

    As a context manager it leaves the job at its end. After an exception it tells the other ranks, whose
    calls then raise `NodeFailed` with its text.

    Args:
        scheduler: HOST:PORT of the scheduler.
        rank: that this process asks for; -1: any that is free.
        size: how many ranks the job has.
        job: its name, if the scheduler serves several.
        site: of this rank, by name.
        timeout: seconds that a call may take which brings none, until the job ends with an error that names
            who is missing. None: `NETSTORM_WAIT_TIMEOUT`.

    Raises:
        UsageError: no scheduler is named.
        NetStormError: the job does not come together.
    """

    def __init__(
        self,
        *,
        scheduler: str | None = None,
        rank: int | None = None,
        size: int | None = None,
        job: str | None = None,
        site: str | None = None,
        timeout: float | None = None,
    ) -> None:
        _check_timeout(timeout)
        arguments = {"scheduler": scheduler, "rank": rank, "size": size, "job": job, "site": site}
        self._job, self._member = _join(arguments)
        self._runtime: Final = self._member.runtime
        self._exchanges: Final = CollectiveExchanges(self._member.rank, self._member.size)
        self._calls: Final = self._member.own_calls
        self._timeout_s: Final = self._runtime.settings.wait_timeout_s if timeout is None else timeout
        self._lock: Final = threading.Lock()
        self._closed = False
        self._state: Final = _SharedState(self._member)
        before_finish(self._state.leave_to_newcomers)

    # -------------------------------------------------------------------------------------------- who is here

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._member.rank

    @property
    def size(self) -> int:
        """How many ranks the job has. An elastic job (`NETSTORM_ELASTIC=MIN:MAX`) has MAX, here or not."""
        return self._member.size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are in the job now, as this process has last heard. All, but in an elastic job.

        Ranks hear of a change at different times. What all must decide alike has to depend on
        `GroupFuture.contributors`.
        """
        return self._runtime.node.live.ranks

    @property
    def is_newcomer(self) -> bool:
        """Whether this process has joined an elastic job that had begun, and has to call `share_state`."""
        return self._runtime.node.needs_state

    # -------------------------------------------------------------------------------------- calls that reduce

    @overload
    def allreduce(
        self, array: Leaf, op: Op = "sum", *, out: Array | None = None, timeout: float | None = None
    ) -> Array: ...
    @overload
    def allreduce(
        self,
        array: dict[Any, Any],
        op: Op = "sum",
        *,
        out: dict[Any, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[Any, Any]: ...
    @overload
    def allreduce(
        self,
        array: list[Any],
        op: Op = "sum",
        *,
        out: list[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]: ...
    @overload
    def allreduce(
        self, array: Tree, op: Op = "sum", *, out: Tree = None, timeout: float | None = None
    ) -> Tree: ...
    def allreduce(
        self, array: Tree, op: Op = "sum", *, out: Tree = None, timeout: float | None = None
    ) -> Tree:
        """Reduce an array over all ranks, element by element; every rank gets the same bits.

        Args:
            array: an array, or a list, tuple or dictionary of them; it stays as it is.
            op: "sum", "mean", "product", "min" or "max". The mean of whole numbers and of truth values is
                one of float64; all other results have the array's type.
            out: where the result goes; it may be `array` itself. None: a new array.
            timeout: seconds; None: the group's.

        Raises:
            UsageError: what cannot be reduced so.
            NetStormError: why there is no result.
        """
        return self.allreduce_async(array, op, out=out, timeout=timeout).result()

    def allreduce_async(
        self, array: Tree, op: Op = "sum", *, out: Tree = None, timeout: float | None = None
    ) -> GroupFuture[Any]:
        """Begin an `allreduce`, and return its future. Each array of a tree is a call; all are under way."""
        reduction = reduction_of(op)
        prepare = functools.partial(self._reduction, name=f"allreduce({op})", reduction=reduction, root=None)
        return self._begin_tree(array, out, prepare, timeout)

    def reduce(
        self,
        array: Leaf,
        root: int,
        op: Op = "sum",
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array | None:
        """Reduce an array over all ranks; `root` gets the result, all others None. See `allreduce`."""
        return self.reduce_async(array, root, op, out=out, timeout=timeout).result()

    def reduce_async(
        self,
        array: Leaf,
        root: int,
        op: Op = "sum",
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> GroupFuture[Array | None]:
        """Begin a `reduce`, and return its future."""
        name = f"reduce({op}) to rank {self._checked(root, 'root')}"
        call = self._reduction(array, out, "", name=name, reduction=reduction_of(op), root=root)
        return self._begin([call], _only, timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until all ranks have come here.

        Raises:
            BarrierTimeout: at all ranks; names those that have not come.
        """
        try:
            self.barrier_async(timeout=timeout).result()
        except BarrierTimeout:
            raise
        except WaitTimeout as error:
            raise BarrierTimeout(str(error)) from None

    def barrier_async(self, *, timeout: float | None = None) -> GroupFuture[None]:
        """Begin a `barrier`, and return its future."""
        one = np.zeros(1, np.uint8)
        exchange = reduced("barrier()", one, one, Reduction.SUM, Element.UINT8)
        return self._begin([_ReadyCall(exchange, lambda: None)], _only, timeout)

    # ---------------------------------------------------------------------------------------- calls that copy

    def broadcast(
        self, array: Tree, root: int = 0, *, out: Tree = None, timeout: float | None = None
    ) -> Tree:
        """Return the array of `root` at all ranks.

        Args:
            array: an array, or a list, tuple or dictionary of them. At all ranks but `root` its type and
                shape count alone.
            root: a rank.
            out: where the result goes; it may be `array` itself. None: a new array.
            timeout: seconds; None: the group's.

        Raises:
            NodeLost: in an elastic job, at all ranks: `root` is not in it.
            NetStormError: why there is no result.
        """
        return self.broadcast_async(array, root, out=out, timeout=timeout).result()

    def broadcast_async(
        self, array: Tree, root: int = 0, *, out: Tree = None, timeout: float | None = None
    ) -> GroupFuture[Any]:
        """Begin a `broadcast`, and return its future."""
        prepare = functools.partial(self._broadcast, root=self._checked(root, "root"))
        return self._begin_tree(array, out, prepare, timeout)

    def gather(
        self, array: Leaf, root: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> Array | None:
        """Collect every rank's array at `root`, in an array with one more axis, the first, by rank.

        All other ranks get None. In an elastic job, ranks that are not there have zeros.
        """
        return self.gather_async(array, root, out=out, timeout=timeout).result()

    def gather_async(
        self, array: Leaf, root: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> GroupFuture[Array | None]:
        """Begin a `gather`, and return its future."""
        name = f"gather to rank {self._checked(root, 'root')}"
        mine = ready_to_read(array, name)
        text = f"{name} of {describe(mine)}"
        if root != self.rank:
            return self._begin(
                [_ReadyCall(self._exchanges.gather(text, flat(mine), None, root), lambda: None)],
                _only,
                timeout,
            )
        target = Target((self.size, *mine.shape), mine.dtype, out, mine, text)
        exchange = self._exchanges.gather(text, flat(mine), _rows(target.memory), root)
        return self._begin([_ReadyCall(exchange, target.result)], _only, timeout)

    def allgather(self, array: Leaf, *, out: Array | None = None, timeout: float | None = None) -> Array:
        """Collect every rank's array at all ranks, in an array with one more axis, the first, by rank.

        In an elastic job, ranks that are not there have zeros.
        """
        return self.allgather_async(array, out=out, timeout=timeout).result()

    def allgather_async(
        self, array: Leaf, *, out: Array | None = None, timeout: float | None = None
    ) -> GroupFuture[Array]:
        """Begin an `allgather`, and return its future."""
        mine = ready_to_read(array, "allgather")
        text = f"allgather of {describe(mine)}"
        target = Target((self.size, *mine.shape), mine.dtype, out, mine, text)
        exchange = self._exchanges.all_gather(text, flat(mine), _rows(target.memory))
        return self._begin([_ReadyCall(exchange, target.result)], _only, timeout)

    def scatter(
        self, array: Leaf, root: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> Array:
        """Give each rank its row of the array of `root`, by rank along the first axis.

        Args:
            array: with as many rows as there are ranks. At all ranks but `root` its type and shape count
                alone: `np.empty` makes such an array at no cost.
            root: a rank.
            out: where the row goes; None: a new array.
            timeout: seconds; None: the group's.

        Raises:
            UsageError: another number of rows.
            NodeLost: in an elastic job, at all ranks: `root` is not in it.
            NetStormError: why there is no result.
        """
        return self.scatter_async(array, root, out=out, timeout=timeout).result()

    def scatter_async(
        self, array: Leaf, root: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> GroupFuture[Array]:
        """Begin a `scatter`, and return its future."""
        name = f"scatter from rank {self._checked(root, 'root')}"
        whole = ready_to_read(array, name)
        text = f"{name} of {describe(whole)}"
        if whole.shape[:1] != (self.size,):
            raise UsageError(f"{text}: expected {self.size} rows along the first axis, one for each rank")
        target = Target(whole.shape[1:], whole.dtype, out, whole, text)
        rows = _rows(whole) if root == self.rank else None
        exchange = self._exchanges.scatter(text, flat(target.memory), rows, root)
        return self._begin([_ReadyCall(exchange, target.result, root)], _only, timeout)

    # ----------------------------------------------------------------------------------------------- messages

    def send(self, array: Leaf, to: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send an array to one rank, which calls `recv`; messages with one tag arrive in their order.

        It returns when the array may be changed again.
        """
        self.send_async(array, to, tag=tag, timeout=timeout).result()

    def send_async(
        self, array: Leaf, to: int, *, tag: int = 0, timeout: float | None = None
    ) -> GroupFuture[None]:
        """Begin a `send`, and return its future."""
        mine = ready_to_read(array, "send")
        what = describe(mine)
        operation = self._member.send_operation(flat(mine), what, self._checked(to, "to"), tag)
        return self._message(operation, f"send to rank {to} (tag {tag}) of {what}", lambda: None, timeout)

    def recv(self, out: Array, source: int, *, tag: int = 0, timeout: float | None = None) -> Array:
        """Receive a message of exactly the size of `out` from a rank into `out`, and return it."""
        return self.recv_async(out, source, tag=tag, timeout=timeout).result()

    def recv_async(
        self, out: Array, source: int, *, tag: int = 0, timeout: float | None = None
    ) -> GroupFuture[Array]:
        """Begin a `recv`, and return its future."""
        what = f"recv from rank {self._checked(source, 'source')} (tag {tag})"
        like = ready_to_read(out, what)
        target = Target(like.shape, like.dtype, out, np.empty(0), what)
        operation = self._member.receive_operation(flat(target.memory), describe(like), source, tag)
        return self._message(operation, f"{what} of {describe(like)}", target.result, timeout)

    # ------------------------------------------------------------------------------------------- elastic jobs

    def share_state(self, state: Tree) -> Tree:
        """Begin a step of an elastic job, and return its state. Call it before each step, at every rank,
        while no call is under way. In any other job it returns `state` as it is.

        A rank that joins later gets the others' state, with its first call; the others get back their own,
        and offer it to newcomers, which costs a copy. While fewer than MIN ranks are in the job, it waits.

        Args:
            state: what a rank needs to go on as the others do: lists and dictionaries of arrays, numbers and
                texts, equal at all ranks. It must not change before the first call of the step.

        Raises:
            UsageError: something in the state cannot be sent.
            WaitTimeout: fewer than MIN ranks, or nobody with a state, for NETSTORM_WAIT_FOR_NODES.
            NetStormError: the job has failed.
        """
        self._check_open()
        return self._state.share(state) if self._runtime.node.live.is_elastic else state

    # ------------------------------------------------------------------------------------------------ the end

    def step_report(self) -> StepReport:
        """Return what this rank has waited for since the last call; the first call begins to watch."""
        self._check_open()
        return self._runtime.step_report()

    def close(self) -> None:
        """Leave the job, if this is the process's last group. Until all ranks have left, the process forwards
        for the others. Twice does no harm.
        """
        if not self._closed:
            self._closed = True
            self._state.leave_to_newcomers()
            _leave(self._job)

    def __enter__(self) -> Group:  # noqa: PYI034 -- Self is Python 3.11's
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_orderly = error is None or (isinstance(error, SystemExit) and not error.code)
        if not is_orderly and not self._closed:
            self._runtime.fail(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.close()

    def __repr__(self) -> str:
        return f"<Group: rank {self.rank} of {self.size}{', closed' if self._closed else ''}>"

    # ---------------------------------------------------------------------------------------- how calls begin

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this group has been closed: make another one, which joins the next job")
        self._runtime.check()

    def _checked(self, rank: int, name: str) -> int:
        try:
            number = operator.index(rank)
        except TypeError:
            number = -1
        if not 0 <= number < self.size:
            raise UsageError(f"{name}={rank!r}: expected a rank from 0 to {self.size - 1}")
        return number

    def _reduction(
        self, value: Leaf, out: object, path: str, *, name: str, reduction: Reduction, root: int | None
    ) -> _ReadyCall:
        """Prepare to reduce an array to all ranks, or to one."""
        source = ready_to_read(value, f"{name} {path}".rstrip())
        if reduction is Reduction.AVERAGE and source.dtype.kind in "biu":
            source = source.astype(np.float64)
        text = f"{name} of {f'{path} ' if path else ''}{describe(source)}"
        element = element_of(source.dtype, reduction, text)
        if root is not None and root != self.rank:
            exchange = self._exchanges.reduce(
                text, flat(source, element), None, reduction, element, root=root
            )
            return _ReadyCall(exchange, lambda: None)
        target = Target(source.shape, source.dtype, out, source, text)
        arrays = flat(source, element), flat(target.memory, element)
        if root is None:
            return _ReadyCall(reduced(text, *arrays, reduction, element), target.result)
        exchange = self._exchanges.reduce(text, *arrays, reduction, element, root=root)
        return _ReadyCall(exchange, target.result)

    def _broadcast(self, value: Leaf, out: object, path: str, *, root: int) -> _ReadyCall:
        name = f"broadcast from rank {root}"
        source = ready_to_read(value, f"{name} {path}".rstrip())
        text = f"{name} of {f'{path} ' if path else ''}{describe(source)}"
        target = Target(source.shape, source.dtype, out, source, text)
        if root != self.rank:
            return _ReadyCall(self._exchanges.broadcast(text, flat(target.memory), root), target.result, root)
        exchange = self._exchanges.broadcast(text, flat(source), root)
        if target.memory is not source:
            np.copyto(target.memory, source)
        return _ReadyCall(exchange, target.result, root)

    def _begin_tree(
        self, tree: Tree, out: Tree, prepare: Callable[[Any, object, str], _ReadyCall], timeout: float | None
    ) -> GroupFuture[Any]:
        """Begin a call for each leaf of a tree, all of which have been checked before."""
        values = list(leaves(tree))
        targets: Sequence[tuple[str, object]] = [(path, None) for path, _ in values]
        if out is not None:
            targets = list(leaves(out))
            if [path for path, _ in targets] != [path for path, _ in values]:
                raise UsageError("out has another form than the arrays: expected the same lists and keys")
        calls = [
            prepare(value, target, path) for (path, value), (_, target) in zip(values, targets, strict=True)
        ]
        return self._begin(calls, lambda results: with_leaves(tree, results), timeout)

    def _begin(
        self, calls: Sequence[_ReadyCall], whole: Callable[[Iterator[Any]], Any], timeout: float | None
    ) -> GroupFuture[Any]:
        """Begin calls, and return the future of all together."""
        self._check_open()
        limit_s = _check_timeout(timeout) or self._timeout_s
        for call in calls:
            self._calls.check(call.exchange)
        with self._lock:  # numbers are taken in the order in which calls are submitted
            operations = [self._member.operation(self._calls, call.exchange, limit_s) for call in calls]
            text = (
                f"{calls[0].exchange.text}{f' and {len(calls) - 1} more' * (len(calls) > 1)}" if calls else ""
            )
            future = GroupFuture[Any](
                text,
                timeout_s=limit_s,
                deliver=lambda: whole(call.result() for call in calls),
                waiting_for=lambda: self._runtime.process.waiting_text(operations[0]),
                timed_out=self._runtime.fail,
            )

            def ended(error: Exception | None) -> None:
                members = [self._member.contributors(operation) for operation in operations]
                future.finish(error, frozenset.intersection(*members) if members else None)

            done = after_all(len(operations), ended)
            for operation, call in zip(operations, calls, strict=True):
                operation.done = self._with_giver(operation, call.giver, done)
                self._runtime.submit(operation)
        return future

    def _with_giver(self, operation: Any, giver: int | None, done: Done) -> Done:
        if giver is None:
            return done
        return lambda error: done(error or self._member.missing(operation, giver))

    def _message(
        self,
        operation: PointToPointOperation,
        text: str,
        result: Callable[[], Any],
        timeout: float | None,
    ) -> GroupFuture[Any]:
        self._check_open()
        future = GroupFuture[Any](
            text,
            timeout_s=_check_timeout(timeout) or self._timeout_s,
            deliver=result,
            waiting_for=lambda: str(operation),
            timed_out=self._runtime.fail,
        )
        operation.done = future.finish
        self._runtime.submit(operation)
        return future


class _SharedState:
    """The state of the program of one rank of an elastic job, as of its last step."""

    def __init__(self, member: GroupMember) -> None:
        self._member: Final = member
        self._runtime: Final = member.runtime
        self._tensors: Final = NumpyTensors()
        self._step = 0
        """How many steps have begun."""
        self._last: Tree = None
        self._begun_at: dict[str, Position] | None = None
        """Where the calls were when the last step began; None: none has begun, or it is left to nobody."""

    def share(self, state: Tree) -> Tree:
        """See `Group.share_state`."""
        if self._runtime.node.needs_state:
            snapshot = fetch_state(self._runtime)
            content = unpack(memoryview(snapshot.content), self._tensors)
            assert isinstance(content, dict)
            self._member.positions.go_on_at(msgspec.convert(content["calls"], dict[str, Position]))
            state, self._step = content["state"], snapshot.step
        elif self._step == 0:
            take_apart(
                _with_arrays(state), self._tensors
            )  # says now, and not to a newcomer, what cannot be sent
        self._last, self._begun_at = state, self._member.positions.now()
        self._answer()
        wait_for_enough_nodes(self._runtime, self._answer)
        self._step += 1
        return state

    def leave_to_newcomers(self) -> None:
        """Leave the state to ranks that join from now on, if no call has been made since. Not after an
        exception, which may have come in the middle of a step. Twice does no harm.
        """
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None and begun_at == self._member.positions.now() and sys.exc_info()[1] is None:
            self._offer(self._step - 1, None)
        self._last = None

    def _answer(self) -> None:
        """Offer the state to ranks that wait for it."""
        if requests := self._runtime.node.live.state_requests:
            self._offer(self._step, requests)

    def _offer(self, step: int, requests: frozenset[int] | None) -> None:
        positions = self._member.positions
        content = {"calls": msgspec.to_builtins(positions.now()), "state": _with_arrays(self._last)}
        offer_state(self._runtime, step, pack(content, self._tensors), positions.rounds(), requests)


def _with_arrays(state: Tree) -> Tree:
    """Return a state in which NumPy's scalars, and what else has values, are arrays."""
    values = (np.asarray(value) if hasattr(value, "__array__") else value for _, value in leaves(state))
    return with_leaves(state, values)


def _rows(array: Array) -> tuple[Array, ...]:
    """Return the memory of each row of an array in C order."""
    return tuple(flat(row) for row in array)


def _only(results: Iterator[Any]) -> Any:
    return next(results)


def _check_timeout(timeout: float | None) -> float | None:
    """Return a time-out as it is.

    Raises:
        UsageError: it is no time.
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"timeout={timeout!r}: expected seconds above 0, or None")
    return timeout
