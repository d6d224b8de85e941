"""The zeros that a rank contributes after its program has ended, with NETSTORM_UNEVEN=join. Pure.

A finished rank does not know which rounds the others will still push, and need not. It always contributes as
far ahead of what is complete as a node may, so its zeros are there before any rank waits for them. Nor does
it
know whether the others will push dense arrays, rows or compressed ones: zeros have no payload, and a form of
their own that any other form replaces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.undetermined import UndeterminedForm
from netstorm.protocol.messages import ANY_RULE

__all__ = ["ZeroContributions"]


class ZeroContributions:
    """Operations of zeros, one after the other, so that the other ranks' rounds complete."""

    def __init__(self) -> None:
        self._pending: Final[deque[Key]] = deque()

    def begin(self, keys: Iterable[Key]) -> None:
        """Contribute zeros to every round of `keys` that the program has not pushed.

        Args:
            keys: granted keys. Rounds of a key without elements complete without contributions. Collective
                rounds get no zeros: what a rank would contribute is not known.
        """
        for key in keys:
            if key.layout is not None and key.layout.chunks:
                self._pending.extend([key] * key.rounds_under_way)

    def has_pending(self) -> bool:
        """Return whether there are operations to take."""
        return bool(self._pending)

    def take(self) -> list[Operation]:
        """Return the operations to submit now."""
        taken = []
        while self._pending:
            taken.append(self._next(self._pending.popleft()))
        return taken

    def _next(self, key: Key) -> Operation:
        def done(error: Exception | None) -> None:
            if error is None:
                self._pending.append(key)

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
