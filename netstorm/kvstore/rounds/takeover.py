"""Takeover: which chunks of rounds under way move to a new policy. Pure; `chunk_moves` moves them.

A policy is bound to rounds that no rank has begun (`bindings`). But when links have changed, the round under
way and the next one may take many times as long under the old trees. So a policy may take over
(`Policy.takes_over`). One node alone decides about each chunk: the root at which its sum is formed. If the
root has formed the sum, that is the result at all ranks. If not, it never will, and announces that through
the scheduler (`Moved`). Every rank then drops its sum of the chunk, and contributes once more under the new
policy. So each chunk is summed once, by one tree, and all ranks get the same bytes.

Not every chunk moves. Links that change together are noticed one after the other, and if each policy moved
everything, five policies in as many seconds would make ranks send 2.4 times what a round needs. So a chunk
under way stays in its tree if no missing contribution has to cross a slow link (`Policy.slow`). And if a
policy gains less than sending sums again costs, everything under way stays (`Policy.keeps_begun`): only what
has not begun moves.

What is queued at links and has not left is moved, too: sums of moved chunks are taken out of the queues, and
results go over the new policy's trees to the same nodes. So do later results that the old trees would send
over a slow link.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from netstorm.kvstore.paths.relay import reroute_part
from netstorm.kvstore.rounds.round import Round
from netstorm.protocol.messages import Moved, Part, Phase
from netstorm.pslite.machine import Send
from netstorm.topology.policy import Plan

__all__ = ["PartTag", "Takeover"]

_LEAST: Final = 1 / 8
"""A root keeps its chunks of a round if at most this part of them would move: what is in flight arrives
sooner than what is sent again.
"""


class PartTag(NamedTuple):
    """What identifies a part while it is in a link's queue."""

    key: int
    round: int
    chunk: int
    phase: Phase
    version: int
    tree_slot: int
    """The chunk's slot."""
    peer: int


class Takeover:
    """The policy that takes over, and the chunks of open rounds that have moved.

    Attributes:
        plan: of the newest policy that takes over; None: there is none.
        announcements: moves that are to be announced to the scheduler.
    """

    def __init__(self, rank: int) -> None:
        self._rank: Final = rank
        self.plan: Plan | None = None
        self.announcements: list[Moved] = []
        self._slow: frozenset[tuple[int, int]] = frozenset()
        """The links that have become slow, by that policy."""
        self._keeps_begun = False
        """That policy takes no chunk to which another rank has contributed."""
        self._behind_slow_links: dict[int, tuple[tuple[int, ...], ...]] = {}
        """By the version of an earlier plan: for each tree, the bit sets of the ranks behind each slow link.
        """
        self._announced: dict[tuple[int, int], list[Moved]] = {}
        """All announcements of open rounds."""
        self._moves: dict[tuple[int, int], dict[int, Plan]] = {}

    def install(self, plan: Plan) -> bool:
        """Record a policy; return whether it takes over from now on."""
        if not plan.policy.takes_over or (self.plan is not None and plan.version <= self.plan.version):
            return False
        self.plan = plan
        self._slow = frozenset(plan.policy.slow)
        self._keeps_begun = plan.policy.keeps_begun
        self._behind_slow_links.clear()
        return True

    def moves(self, key: int, round: int) -> dict[int, Plan]:
        """Return the plans of the moved chunks of a round, by chunk. Later moves change this dictionary."""
        return self._moves.setdefault((key, round), {})

    def version_of(self, key: int, round: int, chunk: int) -> int | None:
        """Return the version that a chunk has moved to, or None."""
        moves = self._moves.get((key, round))
        return moves[chunk].version if moves and chunk in moves else None

    def chunks_to_move(self, round: Round) -> list[int]:
        """Return the chunks that this node is the root of, has not summed, and should move."""
        plan = self.plan
        if plan is None or round.version >= plan.version:
            return []
        mine, left = 0, []
        for chunk, slot in enumerate(round.layout.slots):
            now = round.plan_of(chunk)
            tree = now.tree_of(slot)
            if now.root[tree] == self._rank:
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

    def record_moved(self, key: int, round: int, chunks: Iterable[int]) -> None:
        """Record that this node moves chunks, of which it is the root, to the policy that takes over."""
        assert self.plan is not None
        announcement = Moved(key=key, round=round, version=self.plan.version, chunks=tuple(chunks))
        self.announcements.append(announcement)
        self._announced.setdefault((key, round), []).append(announcement)

    def take_announcements(self) -> list[Moved]:
        """Return what is to be announced to the scheduler, once."""
        taken, self.announcements = self.announcements, []
        return taken

    def all_announcements(self) -> tuple[Moved, ...]:
        """Return all that a restarted scheduler must know; it includes what is not announced yet."""
        self.announcements.clear()
        return tuple(moved for announced in self._announced.values() for moved in announced)

    def begin_view(self, version: int) -> None:
        """Forget moves to policies before that of a new view, to which everything moves."""
        self.announcements = [moved for moved in self.announcements if moved.version > version]
        for owner, announced in list(self._announced.items()):
            announced[:] = [moved for moved in announced if moved.version > version]
            if not announced:
                del self._announced[owner]
        for moves in self._moves.values():
            for chunk in [chunk for chunk, plan in moves.items() if plan.version <= version]:
                del moves[chunk]

    def end_round(self, key: int, round: int) -> None:
        """Forget a round that is complete here: all ranks have contributed, and know what has moved."""
        self._announced.pop((key, round), None)
        self._moves.pop((key, round), None)

    def clear(self) -> None:
        """Forget everything."""
        self.announcements.clear()
        self._announced.clear()
        self._moves.clear()

    # ------------------------------------------------------------------------------------ results under way

    def should_reroute(self, tag: Hashable) -> bool:
        """Return whether a part that waits for a link is a result that should go over the new trees."""
        if not isinstance(tag, PartTag) or self.plan is None or tag.phase is not Phase.BROADCAST:
            return False
        if self._keeps_begun and (self._rank, tag.peer) not in self._slow:
            return False
        return tag.version < self.plan.version and len(self._new_path(tag)) > 2

    def avoids_link(self, tag: PartTag) -> bool:
        """Return whether a part about to be sent is such a result, and its link is slow."""
        return (self._rank, tag.peer) in self._slow and self.should_reroute(tag)

    def rerouted(self, sends: Iterable[Send]) -> list[Send]:
        """Return results that were taken back as they are sent now, source-routed along the new trees."""
        rerouted = []
        for send in sends:
            assert isinstance(send.tag, PartTag)
            assert isinstance(send.message, Part)
            rerouted.append(reroute_part(send, self._rank, self._new_path(send.tag)))
        return rerouted

    def _new_path(self, tag: PartTag) -> tuple[int, ...]:
        assert self.plan is not None
        return self.plan.path_to(tag.tree_slot, tag.peer)
