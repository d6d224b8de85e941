"""The process group: what `torch.distributed` calls, in Python and from C++."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, get_process_group_ranks

from netstorm import clock
from netstorm.errors import BarrierTimeout, NodeLost, UsageError, WaitTimeout
from netstorm.frontends.torch.collectives import CopyCalls, Exchanges, Messages, Reductions, SparseSums
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.internals import Backend, Store, replace_set_pg_timeout
from netstorm.frontends.torch.member import CallWork, ProcessGroupMember, methods_are_never_compiled
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.tensors import Staged

__all__ = ["NetStormProcessGroup", "let_pytorch_call_us", "netstorm_group"]


_ProcessGroup: Final[Any] = ProcessGroup
"""Without PyTorch's types: those of its binding do not fit what it takes from Python."""


@methods_are_never_compiled
class NetStormProcessGroup(Reductions, CopyCalls, Messages, _ProcessGroup):
    """One group, at one member. PyTorch makes it (`startup`); programs use `torch.distributed`."""

    # What PyTorch asks a backend, and finds here, since this group is its own backend (`_get_backend`).
    supports_coalescing = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, member: ProcessGroupMember, closed: Callable[[], None], store: Store) -> None:
        """Begin.

        Args:
            member: this process in the group.
            closed: called when the group is destroyed.
            store: PyTorch's, of this group.
        """
        self._begin(member.rank, member.size, member.name, store)
        self._enter(member)
        self._closed: Callable[[], None] = closed

    def _begin(self, rank: int, size: int, name: str, store: Store) -> None:
        super().__init__(rank, size)
        self._store: Store = store
        self._is_closed = False
        self._why_closed = "has been destroyed"
        self._name = name
        self._description = "undefined"

    def _enter(self, member: ProcessGroupMember) -> None:
        self._member = member
        self._exchanges = Exchanges(member.rank, member.size)
        self._sparse = SparseSums(member, self._exchanges)
        self._monitored_barriers = MonitoredBarriers(member)

    @property
    def member(self) -> ProcessGroupMember:
        """This process in the group."""
        return self._member

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come; rank 0's error names those that have not."""
        self._check_open()
        limit = self._timeout if timeout is None else timeout
        raises_torch_errors(self._monitored_barriers.wait)(limit, wait_all_ranks=wait_all_ranks)

    # ---------------------------------------------------------------------------------- what PyTorch asks

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._member.rank

    def size(self) -> int:
        """Return how many members the group has."""
        return self._member.size

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def getBackendName(self) -> str:  # noqa: N802 -- PyTorch's name
        """Return the backend's name, to C++."""
        return NAME

    @property
    def group_name(self) -> str:
        """The group's name: the same at every member."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the program calls the group."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name, to C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the program calls the group, to C++."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors may be. The CPU is first: PyTorch then sends objects and states from there."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> NetStormProcessGroup:
        """Return what carries out the calls of a device's tensors.

        Raises:
            RuntimeError: nothing does, in the words that PyTorch has for it.
        """
        kind = torch.device(device).type
        if kind not in {each.type for each in self._device_types}:
            raise RuntimeError(f"No backend type associated with device type {kind}: {NAME} has none for it")
        return self

    @property
    def options(self) -> Any:
        """The group's time-out and ranks, as PyTorch's backends have them."""
        options: Any = Backend.Options(NAME, self._timeout)
        options.global_ranks_in_group = get_process_group_ranks(self)
        options.group_name = self._name
        return options

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """Return whether this group has memory of its own for tensors."""
        return False

    def get_group_store(self) -> Store:
        """Return PyTorch's store of this group."""
        return self._store

    @property
    def _timeout(self) -> timedelta:
        return self._member.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later calls."""
        self._member.timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collective calls the program has made."""
        return self._member.called

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all members count from 0."""

    # ------------------------------------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Destroy the group. Twice does no harm."""
        if not self._is_closed:
            self._is_closed = True
            self._sparse.close()
            self._closed()

    def end(self, why: str) -> None:
        """Destroy the group for a reason, which the errors of later calls give."""
        self._why_closed = why
        self.shutdown()

    def abort(self) -> None:
        """Destroy the group, and fail the job: other ranks may wait for calls that will not come."""
        if not self._is_closed:
            self._member.runtime.fail(f"process group {self._name!r} was aborted")
        self.shutdown()


# The barrier that names who is missing: everybody tells rank 0, which answers all.
#
# Its errors have the words of Gloo's, for which scripts and people search their logs.

_CHANNEL: Final = "/monitored_barrier"
_LEAST_S: Final = 0.001
_FAILED: Final = 0
_PASSED: Final = 1


class MonitoredBarriers:
    """The monitored barriers of one member of a group."""

    def __init__(self, member: ProcessGroupMember) -> None:
        self._member: Final = member
        self._arrivals: Final[dict[int, CallWork]] = {}
        """At rank 0: receives from ranks that have not come, by rank. They serve the next barrier, too."""

    def wait(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        """Wait until all ranks have come.

        Args:
            timeout: how long rank 0 waits for the others.
            wait_all_ranks: name every rank that is missing; otherwise the first that is found.

        Raises:
            BarrierTimeout: at all ranks; rank 0's names those missing.
        """
        if self._member.rank == 0:
            self._wait_for_others(timeout, wait_all_ranks=wait_all_ranks)
        else:
            self._wait_for_answer(timeout)

    def _wait_for_answer(self, timeout: timedelta) -> None:
        member = self._member
        start = (
            f"[Rank {member.rank}]: Rank {member.rank} successfully reached monitoredBarrier, but received "
            "errors while waiting for send/recv from rank 0"
        )
        self._send(0, _PASSED)
        answer = torch.empty(1, dtype=torch.uint8)
        limit = timedelta(seconds=max(_LEAST_S, 2 * timeout.total_seconds()))
        try:
            self._receive(0, answer).wait(limit)
        except WaitTimeout:
            raise BarrierTimeout(
                f"{start} of group {member.name!r}: no answer within {limit.total_seconds():g} s"
            ) from None
        if int(answer) == _FAILED:
            raise BarrierTimeout(
                f"{start} of group {member.name!r}: other ranks have not come; its error names them"
            )

    def _wait_for_others(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        member = self._member
        deadline = clock.monotonic() + timeout.total_seconds()
        for rank in range(1, member.size):
            if rank not in self._arrivals:
                self._arrivals[rank] = self._receive(rank, torch.empty(1, dtype=torch.uint8))
        come, missing = [], []
        for rank, work in list(self._arrivals.items()):
            try:
                work.wait(timedelta(seconds=max(_LEAST_S, deadline - clock.monotonic())))
            except WaitTimeout:
                missing.append(rank)
            except NodeLost:  # it is not in the job any more, which goes on without it
                del self._arrivals[rank]
            else:
                come.append(rank)
                del self._arrivals[rank]
            if missing and not wait_all_ranks:
                break
        for rank in come:
            self._send(rank, _FAILED if missing else _PASSED)
        if missing:
            names = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            limit_ms = timeout / timedelta(milliseconds=1)
            raise BarrierTimeout(
                f"[Rank 0]: {names} failed to pass monitoredBarrier in {limit_ms:g} ms. Rank 0 timed out in "
                f"monitoredBarrier of group {member.name!r}"
            )

    def _send(self, rank: int, value: int) -> None:
        memory = Staged(torch.full((1,), value, dtype=torch.uint8), write=False)
        operation = self._member.send(memory, "monitored_barrier", rank, 0, _CHANNEL)
        self._member.exchange_messages("monitored_barrier", [(operation, memory)], [], timedelta(0))

    def _receive(self, rank: int, target: torch.Tensor) -> CallWork:
        memory = Staged(target)
        operation = self._member.receive(memory, "monitored_barrier", rank, 0, _CHANNEL)
        return self._member.exchange_messages("monitored_barrier", [(operation, memory)], [], timedelta(0))


def netstorm_group(group: ProcessGroup | None, what: str) -> NetStormProcessGroup:
    """Return a group, or the default one.

    Raises:
        UsageError: it is none of NetStorm's; `what` is over it.
    """
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, NetStormProcessGroup):
        raise UsageError(
            f"{what} over a group of type {type(chosen).__name__}: expected one of backend netstorm, as "
            "torch.distributed.new_group(backend='netstorm') makes"
        )
    return chosen


def let_pytorch_call_us() -> None:
    """Have `torch.distributed.monitored_barrier` and `_set_pg_timeout` work with NetStorm's groups: PyTorch's
    own functions refuse, or leave out, backends that are not its own. Twice does no harm.
    """
    barrier = dist.monitored_barrier
    if hasattr(barrier, "of_netstorm"):
        return

    @functools.wraps(barrier)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        chosen = _own_group(group)
        if chosen is None:
            return barrier(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    def setting_own(set_timeout: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(set_timeout)
        def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
            chosen = _own_group(group)
            if chosen is None:
                set_timeout(timeout, group)
            else:
                chosen.set_timeout(timeout)

        return set_pg_timeout

    monitored_barrier.of_netstorm = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
    replace_set_pg_timeout(setting_own)


def _own_group(group: Any) -> Any:
    """Return a group of NetStorm's; None: it is another backend's, or this process is not in it."""
    chosen: Any = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(chosen) != NAME:
        return None
    return chosen
