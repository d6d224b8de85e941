"""Who may send which message to whom, and what the receiver checks of it. Pure.

State machines consult the table before they look into a message. So no machine has to expect, say, a policy
from a member. What a message says of its sender is not asked: the session tells who that is. The page on
authority in the documentation is this table (`scripts/docs_reference.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from netstorm.errors import NotAuthorised
from netstorm.protocol import messages as m

__all__ = ["AUTHORITY", "Authority", "Role", "check_authority", "may_send", "not_authorised"]


class Role(enum.Enum):
    """What a process is, to the one that has a session with it."""

    SCHEDULER = "the scheduler"
    MEMBER = "a node of the job"
    APPLICANT = "a process that has not joined"
    RECOVERER = "a scheduler that takes the job over"
    ANYBODY = "whoever can connect"


@dataclass(frozen=True, slots=True)
class Authority:
    """The rights of one class of messages."""

    ways: tuple[tuple[Role, Role], ...]
    """Who may send it to whom."""
    checked: str
    """What the receiver checks of its content, for a person."""


_S, _M, _A = Role.SCHEDULER, Role.MEMBER, Role.APPLICANT


def _session(checked: str) -> Authority:
    return Authority(((Role.ANYBODY, Role.ANYBODY),), checked)


def _report(checked: str) -> Authority:
    """Return the rights of what a member tells the scheduler."""
    return Authority(((_M, _S),), checked)


def _order(checked: str) -> Authority:
    """Return the rights of what the scheduler tells members."""
    return Authority(((_S, _M),), checked)


def _between(checked: str) -> Authority:
    """Return the rights of what members tell one another."""
    return Authority(((_M, _M),), checked)


_ROUTE: Final = "its path"
_ANSWER: Final = f"{_ROUTE}; it answers an open request of the receiver, which it can be answered with"
_ANNOUNCED: Final = "its number is new; texts, and what waits of its sender, are bounded"
_OWNED: Final = f"{_ROUTE}; the receiver owns what it is about"
_OWNERS: Final = f"{_ROUTE}; its first rank is the owner of the block; it answers an open request"

AUTHORITY: Final[Mapping[type[m.Message], Authority]] = MappingProxyType(
    {
        # ------------------------------------------------------------------------------------------ sessions
        m.Hello: _session(
            "job and receiver are those of this process; a rank's incarnation is the one that the scheduler "
            "has named, and its connection has the key with which that process has joined (NETSTORM_KEY_FILE)"
        ),
        m.Welcome: _session(
            "it answers a Hello of this process, over the same connection; later ones of a session have the "
            "number of the first one, which no other process knows"
        ),
        m.Refused: _session("it answers a Hello of this process, over the same connection"),
        m.Ack: _session("it names nothing that was not sent in this session"),
        m.Nack: _session("it names a message of this session that is not acknowledged"),
        m.Query: _session("the session is open"),
        m.Goodbye: _session("it ends the sender's own session only"),
        m.Reserve: _session("the receiver lets connections wait, and not too many; none has a session"),
        m.LaneOffer: _session("the length of its key; the receiver has lanes, and not too many"),
        m.LaneAnswer: _session("it answers an offer of this process, in this session, and the first time"),
        # ---------------------------------------------------------------------------------------- membership
        m.Join: Authority(
            ((_A, _S), (_M, _S)),
            "release, number of nodes, job-wide settings and address; no live node has the rank or address",
        ),
        m.Joined: Authority(((_S, _A),), "the node has not joined before"),
        m.Barrier: _report("it is the sender's next barrier, and few are outstanding"),
        m.BarrierReached: _order("the receiver waits at it"),
        m.Finished: _report("the sender has not finished before; it is about the sender alone"),
        m.PeerFinished: _order("the rank is one of the job's"),
        m.AllFinished: _order("nothing: the scheduler decides"),
        m.Failed: Authority(((_M, _S), (_A, _S)), "it is about the sender alone, which errors name"),
        m.Suspect: _report(
            "the other rank is in the job; it counts as lost only if it is silent, or if its own connection "
            "has ended, too"
        ),
        m.Alive: _order("the rank is one of the job's"),
        m.Probe: _order("nothing: it has no content"),
        m.PeerGone: Authority(
            ((_S, _M), (_S, _A)),
            "of a scheduler that has come back, or takes over: its proof, if the job has a key",
        ),
        m.Leave: Authority(((_M, _S), (_A, _S)), "it is about the sender alone, which errors name"),
        # -------------------------------------------------------------------------------- keys and policies
        m.RegisterKeys: _report(
            "shape, type and size can be summed; the sender is one of the key's ranks; others have "
            "registered the same; bounded in number"
        ),
        m.KeysRegistered: _order("the receiver has asked for the keys"),
        m.TopologyRequest: _report(
            "the key is registered, the sender contributes to it, and has been granted the round"
        ),
        m.TopologyAnswer: _order("it does not contradict an earlier one"),
        m.NewPolicy: _order("trees, weights and paths are whole; the job's ranks are in them"),
        m.Moved: Authority(
            ((_M, _S), (_S, _M)),
            "from a member: it is the root of these chunks under the policy that they are bound to, and the "
            "later policy takes over",
        ),
        m.CallsWaiting: _report("the sender is a member of the group; texts are bounded"),
        m.CallTimedOut: _report("the sender is one of the members that it names, all are ranks of the job"),
        m.ReplicaDigest: _report(
            "the key is registered, the sender is one of its ranks; the round is granted"
        ),
        m.StepTimes: _report("times are plausible, and the number of trainings is bounded"),
        m.StepsGranted: _order("it answers the receiver's last report; within the bounds that it has named"),
        # -------------------------------------------------------------------------------------------- values
        m.Part: _between(
            "key, chunk, type, size and policy are those that the scheduler has fixed. A sum comes from a "
            "child in the chunk's tree, and counts exactly the ranks of that child's subtree, none of which "
            "is in the sum already. A result comes from the parent, once this rank has sent its sum; after a "
            f"change of the view, from the rank that the scheduler has named. On an auxiliary path: {_ROUTE}"
        ),
        m.Delivered: _between("it comes back along the path of a part that this node has sent or forwarded"),
        # --------------------------------------------------------------------------------------------- links
        m.LinkTrial: _between("an answer counts only if the link to the sender has failed"),
        m.LinkRestored: _report("the link begins at the sender, and ends at another rank of the job"),
        m.FailedLinks: _order("nothing: the scheduler decides"),
        # -------------------------------------------------------------------------------------------- status
        m.Heartbeat: Authority(((_M, _S), (_A, _S)), "it is about the sender alone; its text is cut"),
        m.Waiting: Authority(((_S, _M), (_S, _A)), "nothing: it is for people"),
        m.Measured: _report(
            "links begin or end at the sender, by form of the message; rates and latencies are plausible"
        ),
        m.NodeStatus: _report("it is about the sender alone; numbers that are none are not shown"),
        # ------------------------------------------------------------------------------------------ resuming
        m.Resume: _report(
            "each part as the message that it repeats; for a standby scheduler: the sender is among the "
            "members that it names, and the parts fit together",
        ),
        m.Resumed: _order(
            "its proof, if the job has a key: only schedulers of this job can make it, and only for the "
            "receiver. Without it the receiver takes nothing from a scheduler that comes back, or takes over"
        ),
        m.Recover: Authority(
            ((Role.RECOVERER, _M),),
            "its proof, if the job has a key: only schedulers of this job can make it, and only for the "
            "receiver; counts only if the receiver has lost its scheduler; the address can be one",
        ),
        m.RecoverAnswer: Authority(
            ((_M, Role.RECOVERER),),
            "the job has as many places as the receiver's; it decides whom else the receiver asks, and "
            "whether the sender counts, no more",
        ),
        # --------------------------------------------------------------------------------------------- views
        m.NewView: _order("it is newer than the one before"),
        m.ViewReport: _report(
            "the sender was asked, and has not answered; keys are registered, rounds granted, chunks among "
            "those of the round. The job goes on without a sender of others"
        ),
        m.ViewAgreed: _order("it is about the newest view that the receiver knows"),
        m.KeysAnnounced: _order("each key has a description and a number"),
        m.CaughtUp: _report("the sender is a silent member"),
        # ---------------------------------------------------------------------------- asynchronous training
        m.Push: _between(
            f"{_OWNED}; type, size and update rule are the key's; numbers are near the last one"
        ),
        m.Applied: _between(_OWNERS),
        m.Pull: _between(_OWNED),
        m.Value: _between(f"{_OWNERS}; type and size are those asked for"),
        m.Tick: _between(f"{_ROUTE}; it is near the sender's last clock"),
        m.PullRows: _between(f"{_OWNED}; rows are in the chunk"),
        m.PullStates: _between(_OWNED),
        m.States: _between(_OWNERS),
        m.BlockCopy: _between(
            f"{_ROUTE}; its first rank owns the block, and the receiver is its replica; or the receiver owns "
            "it, and has asked for the state. Sizes are the block's, and the number of ranks is the job's"
        ),
        m.CopyKept: _between(f"{_ROUTE}; its first rank is the replica of a block that the receiver owns"),
        m.CopyWanted: _between(f"{_ROUTE}; its first rank owns the block in the view"),
        m.CopyReleased: _between(f"{_ROUTE}; its first rank owns the block in the view"),
        m.CopiesHeld: _between(f"{_ROUTE}; its first rank is in the view, and has the job's state"),
        # ------------------------------------------------------------------------------------ point to point
        m.SmallMessage: _between(f"{_ROUTE}; {_ANNOUNCED}"),
        m.Offer: _between(f"{_ROUTE}; {_ANNOUNCED}"),
        m.Accept: _between(f"{_ROUTE}; the receiver has offered the message to its first rank"),
        m.Piece: _between(f"{_ROUTE}; the receiver has accepted it from its first rank; its size"),
        m.Taken: _between(f"{_ROUTE}; all pieces have been sent to its first rank"),
        m.Rejected: _between(f"{_ROUTE}; the receiver has sent the message to its first rank"),
        m.CountRequest: _between(_ROUTE),
        m.SendAgain: _between(f"{_ROUTE}; only what is open for its first rank goes there again"),
        m.MessageCount: _between(f"{_ANSWER}; not fewer than have come"),
        # ------------------------------------------------------------------------------ state of newcomers
        m.StateWanted: _between(f"{_ROUTE}; its first rank is a silent member"),
        m.StateOffered: _between(f"{_ROUTE}; its first rank was asked; its size"),
        m.StateAsked: _between(f"{_ROUTE}; its first rank was offered these pieces"),
        m.StatePiece: _between(f"{_ROUTE}; its first rank was asked for it; its size; the whole has the CRC"),
        m.StateReceived: _between(f"{_ROUTE}; its first rank is or was a silent member"),
    }
)

_ALLOWED: Final = MappingProxyType(
    {
        (sender, receiver): frozenset(
            kind for kind, rights in AUTHORITY.items() if (sender, receiver) in rights.ways
        )
        for sender in Role
        for receiver in Role
    }
)


def may_send(sender: Role, receiver: Role) -> frozenset[type[m.Message]]:
    """Return the classes of messages that a process in one role may send to one in the other."""
    return _ALLOWED[sender, receiver]


def check_authority(message: m.Message, sender: Role, receiver: Role, name: str) -> None:
    """Check that a sender, `name` for a person, may send a message.

    Raises:
        NotAuthorised: it may not.
    """
    if type(message) not in _ALLOWED[sender, receiver]:
        raise not_authorised(message, name)


def not_authorised(message: m.Message, name: str) -> NotAuthorised:
    """Return the error for a message that its sender, `name` for a person, may not send here and now."""
    ways = " or ".join(f"{one.value} to {other.value}" for one, other in AUTHORITY[type(message)].ways)
    return NotAuthorised(f"{name} sent a {type(message).__name__}, which it may not: it is from {ways}")
