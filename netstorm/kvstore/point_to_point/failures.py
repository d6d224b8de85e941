"""Why a send or a receive fails: errors that name both ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.errors import UnevenRounds, UsageError
from netstorm.kvstore.operations.point_to_point import ReceiveOperation

__all__ = ["Described", "mismatch_error", "never_received_error", "never_sent_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A message, as errors name it."""

    sender: int
    receiver: int
    tag: int
    what: str
    nbytes: int

    def __str__(self) -> str:
        """Return the sender's side."""
        return (
            f"rank {self.sender} sends {self.what}, {self.nbytes} bytes, to rank {self.receiver} with tag "
            f"{self.tag}"
        )


def mismatch_error(sent: Described, expected: str, nbytes: int) -> UsageError:
    """Return the error of both sides if they name different sizes."""
    return UsageError(
        f"{sent}; rank {sent.receiver} expects {expected}, {nbytes} bytes: the two sizes must be equal"
    )


def never_received_error(sent: Described) -> UnevenRounds:
    """Return the error of a send to a rank that has finished."""
    return UnevenRounds(
        f"{sent}, but rank {sent.receiver} has finished without receiving it: every send needs a receive "
        "with the same tag in the same process group"
    )


def never_sent_error(rank: int, receive: ReceiveOperation) -> UnevenRounds:
    """Return the error of a receive on `rank` of what ranks that have finished never sent."""
    subject = "that rank has" if receive.peer >= 0 else "these ranks have"
    return UnevenRounds(
        f"rank {rank} waits for {receive}, but {subject} finished without sending it: every receive needs a "
        "send with the same tag in the same process group"
    )
