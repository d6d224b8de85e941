"""Links that fail, and recover, while the nodes at both ends are alive."""

from __future__ import annotations

import msgspec

from netstorm.protocol.messages.kinds import Message

__all__ = ["FailedLink", "FailedLinks", "LinkRestored", "LinkTrial"]


class LinkTrial(Message, frozen=True, tag=95):
    """A node to another one, over a failed link: do you receive this? Answered over the same connection."""

    answer: bool = False


class LinkRestored(Message, frozen=True, tag=96):
    """A node to the scheduler: the link to a rank that it could not reach works again."""

    rank: int


class FailedLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A link that its source cannot use."""

    source: int
    target: int
    way: tuple[int, ...]
    """The detour: ranks from `source` to `target`, both included; all its links work."""


class FailedLinks(Message, frozen=True, tag=97):
    """The scheduler to all: the complete list of links that have failed at present."""

    links: tuple[FailedLink, ...]
