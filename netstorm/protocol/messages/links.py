"""Links that fail, and come back, while their ends are alive."""

from __future__ import annotations

import msgspec

from netstorm.protocol.messages.kinds import Message

__all__ = ["FailedLink", "FailedLinks", "LinkRestored", "LinkTrial"]


class LinkTrial(Message, frozen=True, tag=95):
    """A node to another one whose link to it has failed: are you there? Answered over the same connection."""

    answer: bool = False


class LinkRestored(Message, frozen=True, tag=96):
    """A node to the scheduler: the link to a rank that it could not reach works again."""

    rank: int


class FailedLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A link that its source cannot use any more."""

    source: int
    target: int
    way: tuple[int, ...]
    """Another way: ranks from `source` to `target`, both included; all of its links work."""


class FailedLinks(Message, frozen=True, tag=97):
    """The scheduler to all: these links have failed at present, and no others."""

    links: tuple[FailedLink, ...]
