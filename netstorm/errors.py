"""Every error that NetStorm raises on purpose, in three families by who is to blame.

`UsageError`: the caller or a setting. `PeerError`: what another process sent. `Unavailable`: loss or
time-out.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

__all__ = [
    "BarrierTimeout",
    "CheckpointError",
    "Closed",
    "Disagreement",
    "FrameError",
    "JoinRefused",
    "KeyMismatch",
    "NetStormError",
    "NetworkFileError",
    "NoRoom",
    "NodeFailed",
    "NodeLost",
    "NodeRemoved",
    "NotAuthorised",
    "OtherProtocol",
    "Overloaded",
    "PeerError",
    "ProtocolViolation",
    "SchedulerLost",
    "SettingsError",
    "TopologyFileError",
    "Unavailable",
    "UnevenRounds",
    "Unreachable",
    "UsageError",
    "WaitTimeout",
]


class NetStormError(Exception):
    """Base of all errors of this package."""


class UsageError(NetStormError, ValueError):
    """The caller asked for something that cannot be done; the message says what can."""


class SettingsError(UsageError):
    """An environment variable or argument has a value that is not allowed."""


class NetworkFileError(UsageError):
    """A network file is wrong; the message begins with file and line."""


class TopologyFileError(UsageError):
    """The file of a custom topology is wrong; the message begins with file and line."""


class Unreachable(UsageError):
    """A network has no path between ranks that must exchange data; the message names them."""


class CheckpointError(UsageError):
    """A checkpoint cannot be written, or not be read; the message names the file and says what to do."""


class KeyMismatch(UsageError):
    """Two ranks registered one key with different shapes or types; the message names both."""


class Disagreement(UsageError):
    """Ranks do not agree where they must (chunk size, update rule, number of nodes); both are named."""


class JoinRefused(UsageError):
    """The scheduler does not let this process into the job, and says why."""


class UnevenRounds(UsageError):
    """A rank waits for a round of a key that another rank will never push, because it has finished."""


class PeerError(NetStormError):
    """Bytes from another process that make no sense."""


class FrameError(PeerError):
    """A frame that does not decode: wrong magic, version, checksum, length or contents."""


class OtherProtocol(FrameError):
    """A frame of a process that speaks another version of the protocol.

    Attributes:
        version: the sender's.
    """

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class ProtocolViolation(PeerError):
    """A well-formed message that its sender was not allowed to send in this state."""


class NotAuthorised(ProtocolViolation):
    """A message that its sender may never send, or that speaks for another process."""


class NoRoom(PeerError):
    """A legal message for which there is no room now. Its sender keeps it until it is asked for."""

    def __init__(self, text: str, waits_for: Hashable = None) -> None:
        super().__init__(text)
        self.waits_for: Final = waits_for
        """Names what the message waits for (`pslite.machine.WaitingBytes`)."""


class Overloaded(PeerError):
    """A legal message after so many others that this process will keep no more. The session is ended."""


class Unavailable(NetStormError, ConnectionError):
    """Something that was needed is not there, or not in time."""


class NodeLost(Unavailable):
    """A general node has died or cannot be reached; the message names rank, host and what was last heard."""


class NodeRemoved(NodeLost):
    """This node is in its elastic job no more: it was silent for too long. The message says since when, and
    why. Its process must end; another one can join in its place.
    """


class NodeFailed(Unavailable):
    """A general node has announced that its program failed; the message carries its reason."""


class SchedulerLost(Unavailable):
    """The scheduler cannot be reached."""


class WaitTimeout(Unavailable, TimeoutError):
    """A wait has reached its deadline; the message names who is missing."""


class BarrierTimeout(WaitTimeout):
    """Not every rank came to a barrier in time; the message names those missing."""


class Closed(UsageError):
    """The store or runtime has been closed, or belongs to another process (after a fork)."""
