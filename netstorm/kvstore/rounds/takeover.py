"""Takeover: chunks of rounds under way move to a new policy. Pure.

A policy is bound to rounds that no rank has begun (`bindings`). But when links have changed, the round under
way and the next one may take many times as long under the old trees. So a policy may take over
(`Policy.takes_over`). One node alone decides about each chunk: the root at which its sum is formed. If the
root has formed the sum, that is the result at all ranks. If not, it never will, and announces that through
the scheduler (`Moved`). Every rank then drops its sum of the chunk, and contributes once more under the new
policy. So each chunk is summed once, by one tree, and all ranks get the same bytes.

Not every chunk moves. Links that change together are noticed one after the other, and if each policy moved
everything, five policies in as many seconds would make ranks send 2.4 times what a round needs. So a chunk
under way stays in its tree if no missing contribution has to cross a slow link (`Policy.slow`). And if a
policy gains less than sending sums again costs, everything under way stays (`Policy.keeps_begun`): only
what has not begun moves.

What is queued at links and has not left is moved, too: sums of moved chunks are taken out of the queues,
and results go over the new policy's trees to the same nodes. So do later results that the old trees would
send over a slow link.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.paths.routes import reroute_part, without_detour
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.round import Extension, PartTag, Round
from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import Moved, Part, Phase
from netstorm.pslite.machine import Send
from netstorm.topology.policy import Plan, Policy

__all__ = ["Takeover"]


_LEAST: Final = 1 / 8
"""A root keeps its chunks of a round if at most this part of them would move: what is in flight arrives
sooner than what is sent again.
"""


class Takeover(Extension):
    """The policy that takes over, and the chunks of open rounds that have moved.

    Attributes:
        plan: of the newest policy that takes over; None: there is none.
        announcements: moves that are to be announced to the scheduler.
    """

    def __init__(self, rounds: Aggregation) -> None:
        self.plan: Plan | None = None
        self.announcements: list[Moved] = []
        self._rounds: Final = rounds
        self._slow: frozenset[tuple[int, int]] = frozenset()
        """The links that have become slow, by that policy."""
        self._keeps_begun = False
        """That policy takes no chunk to which another rank has contributed."""
        self._behind_slow_links: dict[int, tuple[tuple[int, ...], ...]] = {}
        """By the version of an earlier plan: for each tree, the bit sets of the ranks behind each slow link.
        """
        self._announced: dict[tuple[int, int], list[Moved]] = {}
        """All announcements of open rounds."""
        self._later: list[Plan] = []
        """Plans that have come while the view changed."""

    # ----------------------------------------------------------------------------- policies and announcements

    def policy_known(self, policy: Policy) -> None:
        """Plug in with the first policy that takes over."""
        if policy.takes_over:
            self._rounds.extend(self)

    def new_policy(self, plan: Plan, *, later: bool = False) -> None:
        """Install a policy; what is under way moves to it if it takes over: `later`, if the view changes."""
        if later:
            self._later.append(plan)
        elif plan.policy.takes_over and (self.plan is None or plan.version > self.plan.version):
            self.plan = plan
            self._slow = frozenset(plan.policy.slow)
            self._keeps_begun = plan.policy.keeps_begun
            self._behind_slow_links.clear()
            for round in list(self._rounds.rounds.values()):
                self._give_up_chunks(round)
            self._rounds.take_back(self._should_reroute, self._reroute)

    def view_agreed(self, version: int) -> None:
        """Install the policies that have come while the view changed, after that of the view, `version`."""
        plans, self._later = self._later, []
        for plan in plans:
            if plan.version > version:
                self.new_policy(plan)

    def moved(self, announcement: Moved) -> None:
        """Handle the announcement that chunks of a round that is not complete have moved.

        Raises:
            ProtocolViolation: the policy is not known.
        """
        plan = self._rounds.bindings.plan(announcement.version)
        if plan is None:
            raise ProtocolViolation(
                f"chunks have moved to policy {announcement.version}, which is not known here"
            )
        self._rounds.extend(self)
        round = self._rounds.rounds.get((announcement.key, announcement.round))
        if round is None:
            moves = self._rounds.moved.setdefault((announcement.key, announcement.round), {})
            moves.update((chunk, plan) for chunk in announcement.chunks if _is_newer(plan, moves.get(chunk)))
        else:
            self._move(round, announcement.chunks, plan)

    def take_announcements(self) -> list[Moved]:
        """Return what is to be announced to the scheduler, once."""
        taken, self.announcements = self.announcements, []
        return taken

    def all_announcements(self) -> tuple[Moved, ...]:
        """Return all that a restarted scheduler must know; it includes what is not announced yet."""
        self.announcements.clear()
        return tuple(moved for announced in self._announced.values() for moved in announced)

    # ------------------------------------------------------------------------------------- the way of a round

    def intercepts(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> bool:
        """Drop a part of a chunk that has moved, and keep one whose chunk's move is not announced yet."""
        plan, owner = self._rounds.bindings.plan(part.version), (part.key, part.round)
        if plan is None or part.key not in self._rounds.keys or owner in self._rounds.complete:
            return False
        if part.phase is Phase.RECOVERY:
            return False
        bound = self._rounds.bindings.version_of(*owner)
        chunk_plan = self._rounds.moved.get(owner, {}).get(part.chunk)
        moved = None if chunk_plan is None else chunk_plan.version
        if moved is not None and part.version < moved:
            self._rounds.counters.add("parts_of_moved_chunks")
            return True
        current = bound if moved is None else moved
        later = plan.policy.takes_over and (current is None or part.version > current)
        if later or (moved is not None and bound is None):
            self._rounds.early.keep(peer, part, payload, payload_crc)
            return True
        return False

    def opened(self, round: Round) -> None:
        """Move the chunks of a new round before anything is added to it."""
        round.moved = self._rounds.moved.setdefault(round.owner, round.moved)
        round.join(self)
        self._give_up_chunks(round)

    def reroutes(self, send: Send, tag: PartTag, plan: Plan) -> bool:
        """Send a result over the new trees, if its link is slow."""
        if (self._rounds.rank, tag.peer) not in self._slow or not self._should_reroute(tag):
            return False
        self._reroute([send])
        return True

    def view_begins(self, version: int) -> None:
        """Forget moves to policies before that of a new view, to which everything moves."""
        self.announcements = [moved for moved in self.announcements if moved.version > version]
        for owner, announced in list(self._announced.items()):
            announced[:] = [moved for moved in announced if moved.version > version]
            if not announced:
                del self._announced[owner]
        for moves in self._rounds.moved.values():
            for chunk in [chunk for chunk, plan in moves.items() if plan.version <= version]:
                del moves[chunk]

    def ended(self, round: Round) -> None:
        """Forget a round that is complete here: all ranks have contributed, and know what has moved."""
        self._announced.pop(round.owner, None)
        self._rounds.moved.pop(round.owner, None)

    def clear(self) -> None:
        """Forget everything."""
        self.announcements.clear()
        self._announced.clear()
        self._rounds.moved.clear()

    # ------------------------------------------------------------------------------------------- which chunks

    def _give_up_chunks(self, round: Round) -> None:
        """Move the chunks that this node is the root of and has not summed to the policy that takes over."""
        if round.key.spec.members:  # a group's rounds are short beside the job's: they end as they began
            return
        chunks = self._chunks_to_move(round)
        if self.plan is not None and chunks:
            announcement = Moved(
                key=round.key.identity, round=round.round, version=self.plan.version, chunks=tuple(chunks)
            )
            self.announcements.append(announcement)
            self._announced.setdefault(round.owner, []).append(announcement)
            self._move(round, chunks, self.plan)

    def _chunks_to_move(self, round: Round) -> list[int]:
        plan = self.plan
        if plan is None or round.version >= plan.version:
            return []
        mine, left = 0, []
        for chunk in range(len(round.results)):
            now, tree = round.way_of(chunk)
            if now.root[tree] == self._rounds.rank:
                mine += 1
                if round.results[chunk] or now.version >= plan.version:
                    continue
                if not (round.is_under_way(chunk) and self._stays(round, chunk, now, tree)):
                    left.append(chunk)
        return left if len(left) > _LEAST * mine else []

    def _stays(self, round: Round, chunk: int, before: Plan, tree: int) -> bool:
        """Return whether a chunk stays in its tree, whose root is here and has contributions of others."""
        return self._keeps_begun or (bool(self._slow) and self._can_end(round, chunk, before, tree))

    def _can_end(self, round: Round, chunk: int, before: Plan, tree: int) -> bool:
        """Return whether no contribution that the root still misses has to cross a slow link."""
        if before.version not in self._behind_slow_links:
            self._behind_slow_links[before.version] = tuple(
                tuple(
                    tree_of_before.subtree_mask[rank]
                    for rank, parent in enumerate(tree_of_before.reduce_parent)
                    if (rank, parent) in self._slow
                )
                for tree_of_before in before.policy.trees
            )
        have = round.sum_of(chunk).contributors
        return not any(behind & ~have for behind in self._behind_slow_links[before.version][tree])

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
        self._rounds.counters.add("chunks_moved", len(moving))
        owner = round.owner

        def outdated(tag: Hashable) -> bool:
            return (
                isinstance(tag, PartTag)
                and tag.is_sum_of(owner)
                and tag.chunk in moving
                and tag.version < plan.version
            )

        self._rounds.take_back(outdated)
        for chunk in sorted(moving):
            round.moved[chunk] = plan
            round.sums[chunk] = None
            if round.operation is not None:
                self._rounds.contribute(round, chunk)

    # -------------------------------------------------------------------------------------- results under way

    def _should_reroute(self, tag: Hashable) -> bool:
        """Return whether a part that waits for a link is a result that should go over the new trees."""
        if not isinstance(tag, PartTag) or self.plan is None or tag.phase is not Phase.BROADCAST:
            return False
        if self._keeps_begun and (self._rounds.rank, tag.peer) not in self._slow:
            return False
        return tag.version < self.plan.version and len(self._new_path(tag)) > 2

    def _reroute(self, results: list[Send]) -> None:
        """Send results that were taken back, source-routed along the new trees.

        One that waits for its way along earlier trees leaves that: of both ways together the receiver would
        know none, and wait for a policy that has it.
        """
        self._rounds.counters.add("results_around", len(results))
        for send in results:
            assert isinstance(send.tag, PartTag)
            assert isinstance(send.message, Part)
            plain = without_detour(send) if send.message.is_aux else send
            self._rounds.outbox.add(reroute_part(plain, self._rounds.rank, self._new_path(send.tag)))

    def _new_path(self, tag: PartTag) -> tuple[int, ...]:
        assert self.plan is not None
        return self.plan.path_to(tag.tree_slot, tag.peer)


def _is_newer(plan: Plan, than: Plan | None) -> bool:
    return than is None or plan.version > than.version
