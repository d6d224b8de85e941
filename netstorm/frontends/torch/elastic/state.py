"""The state of a program in an elastic job: newcomers get it, and all ranks keep it equal."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import msgspec

from netstorm import clock
from netstorm.checkpoint.format import pack, unpack
from netstorm.errors import UsageError, WaitTimeout
from netstorm.frontends.torch.checkpoint import TorchTensors
from netstorm.frontends.torch.elastic.agreement import Agreement
from netstorm.frontends.torch.elastic.entries import Entries
from netstorm.frontends.torch.elastic.ranks import group_of_all_ranks
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.startup import before_leaving
from netstorm.kvstore.operations.group_calls import Position
from netstorm.kvstore.process.job_state import JobState
from netstorm.kvstore.process.lifetime import before_finish
from netstorm.protocol.ids import ranks_in

__all__ = ["ElasticState"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.05
"""While too few nodes are there: between two looks whether others have come."""


class ElasticState:
    """What a rank that joins later must have to train as the others do.

    Args:
        verify_every: steps between two comparisons of the states of all ranks; 0: only at the start. Each
            rank reads its whole state for that, and sends 8 bytes.
        repair: ranks whose state differs take over that of most ranks; if not, all ranks raise an error.
        entries: by name, objects with `state_dict()` and `load_state_dict()` (model, optimizer, scheduler,
            sampler), and plain values, which `state["name"]` reads and sets.

    Attributes:
        number: how many steps have begun.
        ranks: those whose values were in the last step's reductions; the same at all ranks.

    Raises:
        UsageError: the default process group is not NetStorm's; an entry that cannot be held.
    """

    @raises_torch_errors
    def __init__(self, *, verify_every: int = 100, repair: bool = True, **entries: Any) -> None:
        if verify_every < 0:
            raise UsageError(f"verify_every={verify_every}: expected 0 or more steps")
        self.number = 0
        self.ranks: tuple[int, ...] = ()
        group = group_of_all_ranks()
        self._member: Final = group.member
        self._job: Final = JobState(self._member.runtime)
        self._entries: Final = Entries(entries)
        self._agreement: Final = Agreement(group, self._entries, repair=repair)
        self._verify_every: Final = verify_every
        self._tensors: Final = TorchTensors()
        self._begun_at: dict[str, Position] | None = None
        """Where the calls were when the last step began; None: none has begun, or this state is closed."""
        before_leaving(self.close)
        before_finish(self.close)

    def __getitem__(self, name: str) -> Any:
        """Return an entry."""
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a plain value.

        Raises:
            UsageError: there is none of that name.
        """
        self._entries[name] = value

    @raises_torch_errors
    def step(self) -> int:
        """Begin the next step, and return its number, from 0. Call it before each step, at every rank, while
        no call is under way.

        The first one gives all ranks the same state, at a newcomer that of the others. Later ones offer it to
        newcomers, which costs a copy, and wait while fewer than MIN nodes are in the job.

        Raises:
            Disagreement: the states of ranks differ, and are not to be repaired.
            WaitTimeout: fewer than MIN nodes for NETSTORM_WAIT_FOR_NODES.
            NetStormError: the job has failed.
        """
        if self._job.is_needed:
            self._fetch()
        else:
            self._record_ranks()
            if self.number == 0 or (self._verify_every and self.number % self._verify_every == 0):
                self.ranks = self._agreement.reach(self.number, at_start=self.number == 0)
        self._begun_at = self._member.positions.now()
        self._serve()
        self._entries.set_ranks(self._member.rank, self.ranks, counts=self._job.contributes)
        self._member.reduced_by = None
        self.number += 1
        return self.number - 1

    def close(self) -> None:
        """Leave the state to ranks that join from now on. It is called when the process group is destroyed,
        and at the program's end. Twice does no harm. After an exception, which may have come in the middle of
        a step, nothing is left.
        """
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None and self._job.is_elastic and sys.exc_info()[1] is None:
            has_made_calls = self._member.positions.now() != begun_at
            if has_made_calls:
                self._record_ranks()
            self._offer(self.number if has_made_calls else self.number - 1, None)

    def _record_ranks(self) -> None:
        """Take over who has contributed since the last step began."""
        bits = self._member.reduced_by
        if bits is not None and bits > 0:
            self.ranks = ranks_in(bits)

    def _fetch(self) -> None:
        snapshot = self._job.fetch()
        content = unpack(memoryview(snapshot.content), self._tensors)
        assert isinstance(content, dict)
        self._member.positions.go_on_at(msgspec.convert(content["calls"], dict[str, Position]))
        self._entries.load(content["state"])
        self.ranks = tuple(content["ranks"])
        self.number = snapshot.step
        _log.warning(
            "rank %d goes on with step %d: it has the state of the others (%d bytes)",
            self._member.rank,
            snapshot.step,
            snapshot.nbytes,
        )

    def _serve(self) -> None:
        """Offer the state to newcomers, and wait while there are too few nodes."""
        settings = self._member.runtime.settings
        fewest = (settings.elastic_range or (0, 0))[0]
        deadline: float | None = None
        while True:
            requests = self._job.requests
            if requests:
                self._offer(self.number, requests)
            present = len(self._job.live_ranks)
            if present >= fewest:
                return
            self._member.runtime.check()
            text = f"{present} nodes are in the job, and NETSTORM_ELASTIC={settings.elastic} needs {fewest}"
            if deadline is None:
                deadline = clock.monotonic() + settings.wait_for_nodes_s
                _log.warning("%s: step %d waits for others to join", text, self.number)
            if clock.monotonic() > deadline:
                raise WaitTimeout(
                    f"{text}: nobody has joined for NETSTORM_WAIT_FOR_NODES={settings.wait_for_nodes_s:g} s"
                )
            clock.sleep(_LOOK_EVERY_S)

    def _offer(self, step: int, requests: frozenset[int] | None) -> None:
        content = {
            "calls": msgspec.to_builtins(self._member.positions.now()),
            "ranks": list(self.ranks),
            "state": self._entries.whole(),
        }
        rounds = self._member.positions.rounds()
        self._job.offer(step, pack(content, self._tensors), rounds, requests)
