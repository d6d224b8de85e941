"""Sums that are complete go on: to the parent, or as results. Pure.

A sum may be withheld for a look-ahead (`withheld_sums`), or go on though it lacks contributions
(`bounded_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from netstorm.kvstore.rounds.bounded_loss.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.outgoing import Outgoing
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.withheld_sums import Owner, WithheldSums
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer

__all__ = ["Forwarding"]


class Forwarding:
    """The sums of all open rounds of one node.

    Attributes:
        withheld: sums that wait for the look-ahead.
        loss: rounds that may end without some contributions.
    """

    def __init__(
        self,
        rank: int,
        *,
        rounds: Mapping[Owner, Round],
        outgoing: Outgoing,
        counters: Counters,
        deliver: Callable[[Round, int, Buffer | None, int], None],
    ) -> None:
        """Begin without sums; see `BoundedLoss` for the arguments."""
        self.withheld: Final = WithheldSums()
        self.loss: Final = BoundedLoss(
            rank,
            rounds=rounds,
            outgoing=outgoing,
            counters=counters,
            deliver=deliver,
            withhold_no_more=self._withhold_no_more,
        )
        self._rounds: Final = rounds
        self._outgoing: Final = outgoing
        self._deliver: Final = deliver

    def forward(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum to the parent, if it is complete for this subtree and not withheld. At the root
        it is the result.
        """
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        total, expected = round.sum_of(chunk), plan.expected[tree]
        passed = 0 if round.loss is None else round.loss.passed(chunk, plan.version)
        if not expected or round.results[chunk]:
            return
        if total.contributors | passed != expected:
            if round.loss is not None:
                self.loss.incomplete(round, chunk)
        elif plan.reduce_parent[tree] < 0:
            self.loss.completed(round, chunk)
            result = total.to_keep()
            self._outgoing.send_down(round, chunk, result, None, round.priority, contributors=expected)
            self._deliver(round, chunk, result, expected)
        elif passed or not self.withheld.withhold(round, chunk):
            self._outgoing.send_up(round, chunk)

    def release(self, released: Iterator[tuple[Owner, int]]) -> None:
        """Send the sums that are withheld no longer."""
        for owner, chunk in released:
            round = self._rounds[owner]
            # A faulty peer may have sent the result of what is withheld; moved chunks are not withheld.
            if not round.results[chunk] and chunk not in round.moved:
                self._outgoing.send_up(round, chunk)

    def _withhold_no_more(self, round: Round) -> None:
        span = round.look_ahead_span
        if span is not None:
            waiting = sorted(span.withheld)
            self.release(self.withheld.end(round))
            round.look_ahead_span = None
            for chunk in waiting:
                if not round.results[chunk] and chunk not in round.moved:
                    self._outgoing.send_up(round, chunk)

    def tick(self, now: float) -> None:
        """Send the sums of rounds that have had no result for too long, and end what is late."""
        self.release(self.withheld.release_overdue(self._rounds, now))
        self.loss.tick(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(self.withheld.next_deadline(), self.loss.next_tick())

    def clear(self) -> None:
        """Forget everything."""
        self.withheld.clear()
        self.loss.clear()
