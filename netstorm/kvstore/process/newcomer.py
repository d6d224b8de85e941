"""A process that joins an elastic job late, whose values are with owners: nobody has a state for it."""

from __future__ import annotations

from typing import Final

from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Key

__all__ = ["Newcomer"]


class Newcomer:
    """This process, if it has joined an elastic job that had begun; of any other process it says so.

    It owns nothing at first. Its program gets the owners' values, which are then what it has for blocks that
    nobody has ever updated. Then it takes part.

    Attributes:
        waits: it has joined later, and does not take part yet.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Begin; no key is known."""
        self._runtime: Final = runtime
        self.waits = runtime.node.requests.needs_state

    def knows(self, key: Key) -> bool:
        """Return whether the others had a key before this process came."""
        return self._runtime.node.requests.late_start.knows(key)

    def begin_key(self, key: Key) -> None:
        """Begin with a key whose first round, that of the initial value, was that of the others."""
        key.begin_at(1)
        self._runtime.post(lambda node, now: node.requests.late_start.key(key, 1, now))

    def take_part(self) -> None:
        """Take part from now on: this process may own blocks, and others wait for it at barriers."""
        self.waits = False
        self._runtime.post(lambda node, now: node.requests.late_start.without_state(now))
