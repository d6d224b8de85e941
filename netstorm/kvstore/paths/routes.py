"""Which paths a message may have come along: those that the scheduler has given to its first rank. Pure.

A node that forwards a message could have made it up, in the name of the first rank on its path. So a path
with nodes in between counts only if a policy leads that rank's messages over them; or if the scheduler has
announced that a link of such a path has failed. Whoever forwards for a rank then is one that the rank chose.

A policy may reach the receiver after the first messages that follow it. So a message over an unknown path is
held until something new is known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import FailedLinks, Part, Phase, Routed
from netstorm.pslite.waiting_bytes import Charge, WaitingBytes
from netstorm.topology.member_tree import MemberTree
from netstorm.topology.owners import paths_from
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

__all__ = ["Held", "KnownRoutes"]

_log = logging.getLogger(__name__)

_KEPT: Final = 64
"""Newest policies whose paths count: messages that follow earlier ones have arrived long ago."""

_PATHS: Final = "the paths that messages are on"
"""What they wait for (`pslite.waiting_bytes`)."""

_Path: TypeAlias = tuple[int, ...]

Held: TypeAlias = tuple[Peer, Part | Routed, Buffer | None, int | None, Charge]
"""Sender, message, payload, the payload's checksum, and what it counts."""


class KnownRoutes:
    """The paths to one node, and the messages that wait until their path is known."""

    def __init__(self, rank: int, policy: Policy, counters: Counters, waiting: WaitingBytes) -> None:
        """Begin with the paths of a policy.

        Args:
            rank: of this node.
            policy: the first one.
            counters: of the process.
            waiting: counts what is held.
        """
        self._waiting: Final = waiting
        self._rank: Final = rank
        self._counters: Final = counters
        self._policies: Final[dict[int, Policy]] = {policy.version: policy}
        self._failed: Final[set[tuple[int, int]]] = set()
        """(source, target) of links that have ever failed: messages around them may be on their way."""
        self._shortest: Final[dict[tuple[int, int], _Path]] = {}
        """By version and first rank: the path of messages between two ranks."""
        self._trees: Final[dict[int, Sequence[Tree | MemberTree]]] = {}
        """By version of a policy that takes over."""
        self._known: Final[set[tuple[_Path, bool]]] = set()
        """Paths that policies have, and whether parts come along them, as far as messages have come."""
        self._held: list[Held] = []
        self._changed = False

    def new_policy(self, policy: Policy) -> None:
        """Let messages follow the paths of another policy, too."""
        self._policies[policy.version] = policy
        self._changed = True
        self._known.clear()  # some may be of a policy that is forgotten now
        for version in [known for known in self._policies if known <= policy.version - _KEPT]:
            del self._policies[version]
            self._trees.pop(version, None)
        for place in [place for place in self._shortest if place[0] not in self._policies]:
            del self._shortest[place]

    def failed_links(self, message: FailedLinks) -> None:
        """Let messages go around links that have failed."""
        self._failed.update((link.source, link.target) for link in message.links)
        self._changed = True

    def admits(self, peer: Peer, message: Part | Routed, payload: Buffer | None, crc: int | None) -> bool:
        """Return whether a message may be handled; if not, it is held until its path may be known.

        Raises:
            NoRoom: it would have to be held, and too much waits already.
        """
        path = message.path
        if len(path) < 3 or (path, isinstance(message, Part)) in self._known:
            return True
        if path[-1] != self._rank or message.hop != len(path) - 1 or self._knows(message):
            return True
        size = 0 if payload is None else memoryview(payload).nbytes
        charge = self._waiting.take(size, _PATHS, f"paths such as {list(path[:16])}, which no policy has")
        if not self._held:
            _log.info("rank %d forwards messages of rank %d along a path not known yet", peer, path[0])
        self._counters.add("messages_held")
        self._held.append((peer, message, payload, crc, charge))
        return False

    @property
    def has_news(self) -> bool:
        """Whether the path of a message that is held, or had no room, may be known by now."""
        return self._changed

    def release(self) -> Iterator[Held]:
        """Yield the messages that are held, once, for another try."""
        held, self._held = self._held, []
        self._changed = False
        self._waiting.ready(_PATHS)
        for one in held:
            self._waiting.give_back(one[-1])
        yield from held

    # ------------------------------------------------------------------------------------------------ inside

    def _knows(self, message: Part | Routed) -> bool:
        origin = message.path[0]
        if not all(0 <= rank < policy.size for policy in self._policies.values() for rank in message.path):
            return True  # whoever handles it says what is wrong
        for route in self._routes(message, origin):
            if route == message.path:
                self._known.add((route, isinstance(message, Part)))
                return True
            if any(pair in self._failed for pair in pairwise(route)):
                return True
        return isinstance(message, Part) and message.path in self._tree_paths(message, origin)

    def _routes(self, message: Part | Routed, origin: int) -> Iterator[_Path]:
        """Yield the paths that policies have from a rank to this one, those of the newest policy first."""
        newest_first = sorted(self._policies.items(), reverse=True)
        if not isinstance(message, Part):
            for version, policy in newest_first:
                yield self._shortest_path(version, policy, origin)
            return
        yield (origin, self._rank)
        for _, policy in newest_first:
            for detour in policy.detours:
                if (detour.path[0], detour.path[-1]) == (origin, self._rank):
                    yield detour.path

    def _shortest_path(self, version: int, policy: Policy, origin: int) -> _Path:
        found = self._shortest.get((version, origin))
        if found is None:
            found = self._shortest[version, origin] = paths_from(policy, origin)[self._rank]
        return found

    def _tree_paths(self, part: Part, origin: int) -> Iterator[_Path]:
        """Yield the paths by which policies that take over lead results of a part's policy."""
        for version, policy in self._policies.items():
            ends_are_in = not policy.members or {origin, self._rank} <= set(policy.members)
            newer = policy.takes_over and version > part.version
            if part.phase is Phase.BROADCAST and newer and ends_are_in:
                for tree in self._trees_of(version, policy):
                    yield tree.path(origin, self._rank)

    def _trees_of(self, version: int, policy: Policy) -> Sequence[Tree | MemberTree]:
        if version not in self._trees:
            members = policy.members
            self._trees[version] = [MemberTree(tree, members) if members else tree for tree in policy.trees]
        return self._trees[version]
