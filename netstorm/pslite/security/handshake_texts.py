"""Why a connection does not come about for want of the right key, in words for a person. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

__all__ = ["Mismatch", "is_about_keys", "reason_of_opener"]


class Mismatch(Enum):
    """What ZeroMQ reports of a handshake that has failed."""

    MECHANISM = auto()
    """One side wants encryption and the other one does not."""
    KEY = auto()
    """The other side's key is not the expected one."""
    NOT_ADMITTED = auto()
    """The other side knows the job's key, but does not admit this process's own key."""


_ABOUT_KEYS: Final = ("NETSTORM_KEY_FILE", "NETSTORM_ALLOW")


def reason_of_opener(address: str, mismatch: Mismatch, *, has_key: bool, name: str = "") -> str:
    """Return why this process cannot connect.

    Args:
        address: to which it connects.
        mismatch: what ZeroMQ says.
        has_key: whether this process has a key.
        name: of this node's own key; empty: it has none.
    """
    if mismatch is Mismatch.MECHANISM:
        if has_key:
            return (
                f"{address} is not encrypted, but this process has a key (NETSTORM_KEY_FILE): start all "
                "processes of the job with the same key, or none"
            )
        return (
            f"{address} requires a key, and this process has none: set NETSTORM_KEY_FILE to a copy of the "
            "job's key file"
        )
    if mismatch is Mismatch.NOT_ADMITTED:
        which = f"this node's own key, {name!r}," if name else "this process, which has no NETSTORM_NODE_KEY:"
        return f"{address} does not admit {which} by its list of nodes (NETSTORM_ALLOW)"
    return (
        f"{address} has closed the connection: it has another key than this process (NETSTORM_KEY_FILE), or "
        "none, or is no process of NetStorm"
    )


def is_about_keys(reason: str) -> bool:
    """Return whether a reason is one of `reason_of_opener`: trying again will not help."""
    return any(variable in reason for variable in _ABOUT_KEYS)
