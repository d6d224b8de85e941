"""Which paths a message may have come along: those that the scheduler has given to its first rank. Pure.

A node that forwards a message could have made it up, in the name of the first rank on its path. So a path
with nodes in between counts only if a policy leads that rank's messages over them; or if the scheduler has
announced that a link of such a path has failed. Whoever forwards for a rank then is one that the rank chose.

A policy may reach the receiver after the first messages that follow it. So a message over an unknown path is
held until something new is known.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Generic, TypeAlias, TypeVar, get_args

import msgspec

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.operations import Done, Outbox
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import Delivered, FailedLinks, Part, Phase, Push, Routed, States, Value
from netstorm.pslite.machine import URGENT, Charge, ForwardedBytes, Instruction, Order, Send, WaitingBytes
from netstorm.topology.policy import Policy, paths_from
from netstorm.topology.tree import MemberTree, Tree

__all__ = [
    "Detours",
    "Held",
    "KnownRoutes",
    "RoutedOutbox",
    "check_path",
    "check_route",
    "delivery_confirmation",
    "forwarded_send",
    "messages_to_resend",
    "parts_to_resend",
    "queue_order",
    "relay_confirmation",
    "reroute_message",
    "reroute_part",
    "without_detour",
]


_log = logging.getLogger(__name__)

_KEPT: Final = 64
"""Newest policies whose paths count: messages that follow earlier ones have arrived long ago, but for
those of rounds that this node still waits for.
"""

_PATHS: Final = "the paths that messages are on"
"""What they wait for (`pslite.machine.WaitingBytes`)."""

_Path: TypeAlias = tuple[int, ...]

Held: TypeAlias = tuple[Peer, Part | Routed, Buffer | None, int | None, Charge]
"""Sender, message, payload, the payload's checksum, and what it counts."""


class KnownRoutes:
    """The paths to one node, and the messages that wait until their path is known.

    Attributes:
        has_news: the path of a message that is held, or had no room, may be known by now.
    """

    def __init__(
        self,
        rank: int,
        policy: Policy,
        counters: Counters,
        waiting: WaitingBytes,
        needed: Container[int] = (),
    ) -> None:
        """Begin with the paths of a policy.

        Args:
            rank: of this node.
            policy: the first one.
            counters: of the process.
            waiting: counts what is held.
            needed: versions of policies that rounds of this node may still run under.
        """
        self._needed: Final = needed
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
        self.has_news = False

    def new_policy(self, policy: Policy) -> None:
        """Let messages follow the paths of another policy, too."""
        self._policies[policy.version] = policy
        self.has_news = True
        self._known.clear()  # some may be of a policy that is forgotten now
        oldest = policy.version - _KEPT
        for version in [known for known in self._policies if known <= oldest and known not in self._needed]:
            del self._policies[version]
            self._trees.pop(version, None)
        for place in [place for place in self._shortest if place[0] not in self._policies]:
            del self._shortest[place]

    def failed_links(self, message: FailedLinks) -> None:
        """Let messages go around links that have failed."""
        self._failed.update((link.source, link.target) for link in message.links)
        self.has_news = True

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

    def release(self) -> Iterator[Held]:
        """Yield the messages that are held, once, for another try."""
        held, self._held = self._held, []
        self.has_news = False
        self._waiting.ready(_PATHS)
        for message in held:
            self._waiting.give_back(message[-1])
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
        path = self._shortest.get((version, origin))
        if path is None:
            path = self._shortest[version, origin] = paths_from(policy, origin)[self._rank]
        return path

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


# A node on an auxiliary path: forwarding of parts, and confirmation of their arrival.
#
# A part carries its path (the paper's PATH, arXiv 2404.11352 §VII-B), and a node on it follows that alone,
# whatever policy it has: nodes with different policies could send a chunk to and fro between them. At its end
# the part counts as sent by path[0]. The end confirms its arrival back along the path, and path[0] limits the
# parts on a path that are not confirmed. That bounds what a relay with a slow exit has to store.


def check_path(message: Part | Delivered, peer: Peer, rank: int, size: int) -> None:
    """Check that the path of a message leads from `peer` to `rank`, in a job of `size` ranks.

    Raises:
        ProtocolViolation: it does not.
    """
    path, hop = message.path, message.hop
    back = isinstance(message, Delivered)
    again = isinstance(message, Part) and message.around  # then path[0] may occur a second time
    if (
        not 3 <= len(path) <= size + again
        or len(set(path)) < len(path) - again
        or len(set(path[1:])) < len(path) - 1
        or not all(0 <= hop_rank < size for hop_rank in path)
        or not (0 if back else 1) <= hop < len(path) - back
        or path[hop] != rank
        or path[hop + 1 if back else hop - 1] != int(peer)
    ):
        raise wrong_path_error(message, peer, rank)


def wrong_path_error(message: Part | Delivered | Routed, peer: Peer, rank: int) -> ProtocolViolation:
    """Return the error for a message from `peer` whose path does not lead to `rank`."""
    return ProtocolViolation(
        f"{type(message).__name__} from rank {peer} at hop {message.hop} of path {list(message.path[:16])}, "
        f"which does not lead from there to rank {rank}"
    )


def forwarded_send(
    message: Part | Routed,
    payload: Buffer | None,
    payload_crc: int | None,
    order: Order,
    *,
    peer: Peer,
    counts: ForwardedBytes,
) -> Send | None:
    """Return what a relay sends to the next node of a message's path; None at the path's end.

    Raises:
        Overloaded: too much of `peer`, which has sent it, or of all waits here to be forwarded.
    """
    hop = message.hop + 1
    if hop == len(message.path):
        return None
    size = 0 if payload is None else memoryview(payload).nbytes
    return Send(
        peer=Peer(message.path[hop]),
        message=msgspec.structs.replace(message, hop=hop),
        payload=payload,
        order=order,
        payload_crc=None if payload is None else payload_crc,
        charge=counts.take(peer, size),
    )


def reroute_part(send: Send, rank: int, detour: tuple[int, ...]) -> Send:
    """Return a part as `rank` sends it along `detour` to its next node, and on along the rest of its path.

    At its end it counts as sent by path[0], as on any auxiliary path.
    """
    part = send.message
    assert isinstance(part, Part)
    further = part.path[part.hop + 1 :] if part.is_aux else ()
    walk = without_loops((*detour, *further))
    before = part.path[:1] if part.is_aux and part.path[0] != rank else ()
    if len(walk) == 2 and not before:
        part = msgspec.structs.replace(part, is_aux=False, path=(), hop=0, around=False)
    else:
        path = (*before, *walk)
        part = msgspec.structs.replace(part, is_aux=True, path=path, hop=len(before) + 1, around=True)
    return dataclasses.replace(send, message=part, peer=Peer(walk[1]))


def without_detour(send: Send) -> Send:
    """Return a part as its sender sends it directly, without its auxiliary path."""
    part = send.message
    assert isinstance(part, Part)
    plain = msgspec.structs.replace(part, is_aux=False, path=(), hop=0, around=False)
    return dataclasses.replace(send, message=plain, peer=Peer(part.path[-1]))


def without_loops(walk: tuple[int, ...]) -> tuple[int, ...]:
    """Return a walk that goes on at once from where it would come back to."""
    walked: list[int] = []
    for rank in walk:
        if rank in walked:
            del walked[walked.index(rank) :]
        walked.append(rank)
    return tuple(walked)


def delivery_confirmation(part: Part) -> Send:
    """Return the confirmation that the end of a path sends back for a part."""
    hop = part.hop - 1
    return Send(
        peer=Peer(part.path[hop]),
        message=Delivered(
            path=part.path,
            hop=hop,
            key=part.key,
            round=part.round,
            chunk=part.chunk,
            phase=part.phase,
            version=part.version,
        ),
        back=True,
    )


def relay_confirmation(message: Delivered) -> Send | None:
    """Return a confirmation as a relay sends it further back; None at the begin of the path."""
    if message.hop == 0:
        return None
    hop = message.hop - 1
    return Send(peer=Peer(message.path[hop]), message=msgspec.structs.replace(message, hop=hop), back=True)


def parts_to_resend(
    returned: Iterable[Send], rank: int, is_obsolete: Callable[[Part], bool]
) -> Iterator[Send]:
    """Yield the parts that `rank` sends again, of all that a failed link returns.

    A sum that `is_obsolete` is dropped. Other sums of this rank are copied: they may be the user's memory,
    which the user may change once the result is there. If the sum had arrived after all, the result may come
    while the sum is sent again.
    """
    for send in returned:
        part = send.message
        if not isinstance(part, Part):
            continue
        own = part.phase is Phase.REDUCE and not (part.is_aux and part.path[0] != rank)
        if own and is_obsolete(part):
            continue
        if own and send.payload is not None:
            yield dataclasses.replace(send, payload=bytes(memoryview(send.payload)))
        else:
            yield send


# Links out of this node that have failed: detours around them, and when they are tried again.
#
# A link that cannot be re-established does not end the job. The session returns what it did not deliver. That
# and all that follows goes over other nodes, on a detour that the scheduler has found (`FailedLinks`), like
# any part on an auxiliary path: nodes on it only forward. The other end drops what it has received already,
# since it knows whose contributions are in the sum of each chunk.

_ROUTED: Final = (Part, *get_args(Routed))
"""Messages that can go around a link."""


@dataclass(slots=True)
class _FailedLink:
    """One failed link."""

    detour: tuple[int, ...] = ()
    """Path around it; empty until the scheduler has found one."""
    try_at: float = math.inf
    """When the next trial is due; inf while one is under way."""
    waiting: list[Send] = field(default_factory=list)
    """Messages that wait for a detour."""


class Detours:
    """The failed links of one node.

    Attributes:
        avoided: (source, target) of all failed links that the scheduler has announced.
        failed: those out of this node, by target.
    """

    def __init__(self, counters: Counters, retry_s: float) -> None:
        """Begin with all links working; try failed ones every `retry_s`."""
        self.avoided: Collection[tuple[int, int]] = frozenset()
        self._counters: Final = counters
        self._retry_s: Final = retry_s
        self.failed: Final[dict[int, _FailedLink]] = {}

    def record_failure(self, target: int, now: float) -> bool:
        """Record that a link has failed, or a trial of it; return whether the link worked before."""
        failed = self.failed.get(target)
        if failed is not None:
            failed.try_at = now + self._retry_s
            return False
        self.failed[target] = _FailedLink(try_at=now)
        self._counters.add("links_failed")
        return True

    def record_decision(self, rank: int, message: FailedLinks) -> list[tuple[int, tuple[int, ...]]]:
        """Record the scheduler's detours; return the targets that have one now, with its path.

        What waits for them is to be routed again (`release`).
        """
        self.avoided = frozenset((link.source, link.target) for link in message.links)
        decided = []
        for link in message.links:
            if link.source == rank and link.target in self.failed:
                self.failed[link.target].detour = link.way
                decided.append((link.target, link.way))
        return decided

    def restored(self, target: int) -> list[Send]:
        """Record that a link works again; return what waited for it."""
        self._counters.add("links_restored")
        return self.failed.pop(target).waiting

    def release(self, target: int) -> list[Send]:
        """Return what waits for a link, which then waits no more."""
        link = self.failed[target]
        released, link.waiting = link.waiting, []
        return released

    def forget(self, target: int) -> None:
        """Drop what waits for a rank that is in the job no more."""
        self.failed.pop(target, None)

    def next_trial(self) -> float:
        """Return when the next trial is due."""
        return min((link.try_at for link in self.failed.values()), default=math.inf)

    def due_trials(self, now: float) -> list[int]:
        """Return the targets to which links are to be tried now; they count as tried."""
        due = [target for target, link in self.failed.items() if link.try_at <= now]
        for target in due:
            self.failed[target].try_at = math.inf
        return due

    def route(self, rank: int, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Return the instructions, with messages over failed links sent over detours. Those without a detour
        wait here.
        """
        routed: list[Instruction] = []
        for instruction in instructions:
            if isinstance(instruction, Send) and isinstance(instruction.message, _ROUTED):
                send = self._routed(rank, instruction)
                if send is not None:
                    routed.append(send)
            else:
                routed.append(instruction)
        return routed

    def _routed(self, rank: int, send: Send) -> Send | None:
        for _ in range(len(self.failed) + 1):
            link = self.failed.get(int(send.peer))
            if link is None:
                return send
            if not link.detour:
                link.waiting.append(send)
                return None
            part = send.message
            if not isinstance(part, Part):
                self._counters.add("parts_around_failed_links")
                send = reroute_message(send, rank, link.detour)
            elif part.is_aux and part.path[0] == rank and part.path[-1] not in self.failed:
                send = without_detour(send)  # an auxiliary path, while the link to its end works
            else:
                self._counters.add("parts_around_failed_links")
                send = reroute_part(send, rank, link.detour)
        # Detours that lead over one another's links: the scheduler soon corrects them.
        self.failed[int(send.peer)].waiting.append(send)
        return None


# Source-routed messages: they follow the path that they carry, whatever policy a node on it has.
#
# The data of asynchronous training goes between any two ranks, but only ranks with a link can talk directly.
# What a node has to forward is bounded by what correct ends have outstanding: a push and a pull of each key.
# So, unlike on auxiliary paths, arrival need not be confirmed. Incorrect ones meet `ForwardedBytes`.


def check_route(message: Routed, peer: Peer, rank: int, size: int) -> None:
    """Check that the path of a message leads from `peer` to `rank`, in a job of `size` ranks.

    Raises:
        ProtocolViolation: it does not.
    """
    path, hop = message.path, message.hop
    if (
        not 2 <= len(path) <= size + 1
        or len(set(path[1:])) < len(path) - 1  # around a failed link path[0] may occur twice
        or not all(0 <= hop_rank < size for hop_rank in path)
        or not 1 <= hop < len(path)
        or path[hop] != rank
        or path[hop - 1] != int(peer)
    ):
        raise wrong_path_error(message, peer, rank)


def queue_order(message: Routed, offset: int) -> Order:
    """Return a message's place in links' queues. `offset` is that of its chunk among the job's bytes."""
    if isinstance(message, (Push, Value, States)):
        return (-message.priority, message.number, offset)
    return URGENT


_M = TypeVar("_M", bound=Routed)


class RoutedOutbox(Generic[_M]):
    """Takes the source-routed messages of one kind that one rank sends or forwards, and its completions.

    Attributes:
        local: messages from this rank to itself, with their payloads.
    """

    def __init__(self, rank: int, policy: Policy, outbox: Outbox) -> None:
        """Begin with the links of this policy; `outbox` takes instructions."""
        self.local: list[tuple[_M, Buffer | None]] = []
        self._rank: Final = rank
        self._size: Final = policy.size
        self._policy = policy
        self._paths: tuple[tuple[int, ...], ...] | None = None
        """By target; None: not computed yet."""
        self._outbox: Final = outbox

    def order(self, message: _M) -> Order:
        """Return a message's place in links' queues."""
        raise NotImplementedError

    def new_policy(self, policy: Policy) -> None:
        """Send over the links of this policy from now on."""
        self._policy, self._paths = policy, None

    def send(self, target: int, message: _M, payload: Buffer | None = None) -> None:
        """Send a message, which has an empty path, to a rank, which may be this one."""
        if target == self._rank:
            self.local.append((message, payload))
            return
        if self._paths is None:
            self._paths = paths_from(self._policy, self._rank)
        path = self._paths[target]
        if len(path) < 2:
            return  # it is in the job no more
        routed = msgspec.structs.replace(message, path=path, hop=1)
        self._outbox.add(Send(peer=Peer(path[1]), message=routed, payload=payload, order=self.order(message)))

    def has_arrived(self, peer: Peer, message: _M, payload: Buffer | None, payload_crc: int | None) -> bool:
        """Return whether a message is at the end of its path; if not, forward it.

        Raises:
            ProtocolViolation: its path does not lead here.
            Overloaded: too much waits here to be forwarded.
        """
        check_route(message, peer, self._rank, self._size)
        if message.hop == len(message.path) - 1:
            return True
        further = forwarded_send(
            message,
            payload,
            payload_crc,
            self.order(message),
            peer=peer,
            counts=self._outbox.forwarded,
        )
        if further is not None:
            self._outbox.add(further)
        return False

    def complete(self, done: Done, error: Exception | None = None) -> None:
        """Have `done` called, with the error if there is one."""
        self._outbox.complete(done, error)


def reroute_message(send: Send, rank: int, detour: tuple[int, ...]) -> Send:
    """Return a message as `rank` sends it along `detour`, around a failed link, and on to its end."""
    message = send.message
    assert isinstance(message, get_args(Routed))
    walk = without_loops((*detour, *message.path[message.hop + 1 :]))
    before = message.path[:1] if message.path[0] != rank else ()
    routed = msgspec.structs.replace(message, path=(*before, *walk), hop=len(before) + 1)
    return dataclasses.replace(send, message=routed, peer=Peer(walk[1]))


def messages_to_resend(returned: Iterable[Send]) -> Iterator[Send]:
    """Yield what to send again, of all that a failed link returns.

    The receiver drops what had arrived after all, by its numbers. Values are copied: they may be the user's
    memory, which the user may change once the push has been applied.
    """
    for send in returned:
        if isinstance(send.message, get_args(Routed)):
            copy = None if send.payload is None else bytes(memoryview(send.payload))
            yield dataclasses.replace(send, payload=copy)
