"""How a program begins that joins a running job, and needs no state of the others. Pure.

In asynchronous training the values are with their owners. So a newcomer takes part at once.
"""

from __future__ import annotations

from typing import Final

from netstorm.kvstore.node.lifecycle import Lifecycle
from netstorm.kvstore.values.key import Key

__all__ = ["LateStart"]


class LateStart:
    """The begin of one node's program."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._life: Final = lifecycle

    def knows(self, key: Key) -> bool:
        """Return whether the others had a key before this node came. May be called in any thread."""
        joined = self._life.joined
        return joined is not None and (key.spec.namespace, key.name) in joined.known_keys

    def without_state(self, now: float) -> None:
        """Take part from now on, if this node has joined later."""
        joined = self._life.joined
        if joined is not None and joined.state.needed:
            joined.state.needed = False
            joined.aggregation.views.caught_up = True

    def key(self, key: Key, round: int, now: float) -> None:
        """Sum a key from this round on: the program needs no results of those before."""
        joined = self._life.require_joined()
        if key.identity < 0:
            joined.first_rounds[key] = round
        else:
            joined.aggregation.begin_at({key.identity: round})
