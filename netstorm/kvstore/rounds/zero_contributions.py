"""What a rank contributes after its program has ended, with NETSTORM_UNEVEN=join: zeros. Pure.

A finished rank cannot know which rounds the others will still push, and need not: it is always as far ahead
of what is complete as a node may be, so that its zeros are there before anybody waits for them, and nobody
has to ask. Nor does it know whether they will push dense arrays, rows, or compressed ones: zeros have no
payload, and a form of their own that gives way to any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.undetermined import UndeterminedForm
from netstorm.protocol.messages import ANY_RULE

__all__ = ["Zeros"]


class Zeros:
    """Operations of nobody's, one after the other, so that the others' rounds become complete."""

    def __init__(self) -> None:
        self._due: Final[deque[Key]] = deque()

    def begin(self, keys: Iterable[Key], *, ahead: int) -> None:
        """Contribute zeros to every round of `keys` that the program has not pushed.

        Args:
            keys: granted ones. Rounds of those without elements are complete without anybody's contribution.
            ahead: how many rounds at a time.
        """
        for key in keys:
            if key.layout is not None and key.layout.chunks:
                self._due.extend([key] * ahead)

    def due(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._due)

    def take(self) -> list[Operation]:
        """Return the operations that are to be submitted now."""
        taken = []
        while self._due:
            taken.append(self._next(self._due.popleft()))
        return taken

    def _next(self, key: Key) -> Operation:
        def done(error: Exception | None) -> None:
            if error is None:
                self._due.append(key)

        return Operation(
            key=key,
            round=key.take_round(),
            source=None,
            destination=None,
            done=done,
            rule=ANY_RULE,
            form=UndeterminedForm(),
            for_others=True,
        )
