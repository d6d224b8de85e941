"""The barrier that names who is missing: everybody tells rank 0, which answers all.

Its errors have the words of Gloo's, for which scripts and people search their logs.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from netstorm import clock
from netstorm.errors import BarrierTimeout, NodeLost, WaitTimeout
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.process_group.member import Member
from netstorm.frontends.torch.process_group.memory import Staged
from netstorm.frontends.torch.process_group.work import CallWork

__all__ = ["MonitoredBarriers", "let_pytorch_call_us"]

_CHANNEL: Final = "/monitored_barrier"
_LEAST_S: Final = 0.001
_FAILED: Final = 0
_PASSED: Final = 1


class MonitoredBarriers:
    """The monitored barriers of one member of a group."""

    def __init__(self, member: Member) -> None:
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


def let_pytorch_call_us() -> None:
    """Have `torch.distributed.monitored_barrier` and `_set_pg_timeout` work with NetStorm's groups: PyTorch's
    own functions refuse, or leave out, backends that are not its own. Twice does no harm.
    """
    barrier, set_timeout = dist.monitored_barrier, dist.distributed_c10d._set_pg_timeout  # noqa: SLF001
    if hasattr(barrier, "of_netstorm"):
        return

    @functools.wraps(barrier)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        chosen = _own_group(group)
        if chosen is None:
            return barrier(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    @functools.wraps(set_timeout)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        chosen = _own_group(group)
        if chosen is None:
            set_timeout(timeout, group)
        else:
            chosen.set_timeout(timeout)

    monitored_barrier.of_netstorm = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
        module._set_pg_timeout = set_pg_timeout  # type: ignore[attr-defined]  # noqa: SLF001


def _own_group(group: Any) -> Any:
    """Return a group of NetStorm's; None: it is another backend's, or this process is not in it."""
    chosen: Any = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(chosen) != NAME:
        return None
    return chosen
