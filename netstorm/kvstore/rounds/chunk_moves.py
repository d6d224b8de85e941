"""Moves chunks of rounds under way when a policy takes over; `takeover` decides which. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.rounds.outgoing import Outgoing
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.takeover import PartTag, Takeover
from netstorm.kvstore.rounds.withheld_sums import Owner
from netstorm.observe.counters import Counters
from netstorm.protocol.messages import Moved, Phase
from netstorm.topology.policy import Plan

__all__ = ["ChunkMoves"]


class ChunkMoves:
    """Moves chunks of the open rounds of one node."""

    def __init__(
        self,
        *,
        takeover: Takeover,
        rounds: Mapping[Owner, Round],
        outgoing: Outgoing,
        counters: Counters,
        contribute: Callable[[Round, int], None],
    ) -> None:
        """Begin with nothing moved.

        Args:
            takeover: which chunks have moved.
            rounds: the open rounds; `Aggregation` changes them.
            outgoing: takes parts back that have not left.
            counters: of the process.
            contribute: adds this rank's contribution to a chunk whose sum is empty.
        """
        self._takeover: Final = takeover
        self._rounds: Final = rounds
        self._outgoing: Final = outgoing
        self._counters: Final = counters
        self._contribute: Final = contribute
        self._later: list[Plan] = []
        """Plans that have come while the view changed."""

    def new_policy(self, plan: Plan, *, later: bool = False) -> None:
        """Install a policy; what is under way moves to it if it takes over: `later`, if the view changes."""
        if later:
            self._later.append(plan)
        elif self._takeover.install(plan):
            for round in list(self._rounds.values()):
                self.give_up_chunks(round)
            self._outgoing.take_back(self._takeover.should_reroute, self._outgoing.reroute_results)

    def view_agreed(self, version: int) -> None:
        """Install the policies that have come while the view changed, after that of the view, `version`."""
        plans, self._later = self._later, []
        for plan in plans:
            if plan.version > version:
                self.new_policy(plan)

    def moved(self, announcement: Moved, plan: Plan | None) -> None:
        """Handle the announcement that chunks of a round that is not complete have moved to `plan`.

        Raises:
            ProtocolViolation: the policy is not known.
        """
        if plan is None:
            raise ProtocolViolation(
                f"chunks have moved to policy {announcement.version}, which is not known here"
            )
        round = self._rounds.get((announcement.key, announcement.round))
        if round is None:
            moves = self._takeover.moves(announcement.key, announcement.round)
            moves.update((chunk, plan) for chunk in announcement.chunks if _is_newer(plan, moves.get(chunk)))
        else:
            self._move(round, announcement.chunks, plan)

    def give_up_chunks(self, round: Round) -> None:
        """Move the chunks that this node is the root of, and has not summed, to the policy that takes over.

        Call it before anything is added to a new round, and when that policy comes.
        """
        if round.key.spec.members:  # a group's rounds are short beside the job's: they end as they began
            return
        plan, chunks = self._takeover.plan, self._takeover.chunks_to_move(round)
        if plan is not None and chunks:
            self._takeover.record_moved(round.key.identity, round.round, chunks)
            self._move(round, chunks, plan)

    def _move(self, round: Round, chunks: Iterable[int], plan: Plan) -> None:
        """Drop the sums of some chunks, and contribute to them again under another policy."""
        moving = {
            chunk
            for chunk in chunks
            if 0 <= chunk < len(round.sums)
            and not round.results[chunk]
            and _is_newer(plan, round.plan_of(chunk))
        }
        if not moving:
            return
        self._counters.add("chunks_moved", len(moving))
        key, number = round.key.identity, round.round

        def outdated(tag: Hashable) -> bool:
            return (
                isinstance(tag, PartTag)
                and (tag.key, tag.round) == (key, number)
                and tag.phase is Phase.REDUCE
                and tag.chunk in moving
                and tag.version < plan.version
            )

        self._outgoing.take_back(outdated)
        for chunk in sorted(moving):
            round.moved[chunk] = plan
            round.sums[chunk] = None
            if round.operation is not None:
                self._contribute(round, chunk)


def _is_newer(plan: Plan, than: Plan | None) -> bool:
    return than is None or plan.version > than.version
