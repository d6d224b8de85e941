"""What a node measures of its rounds of local steps, each ended by an exchange. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["RoundTimes"]

_SHORTEST_S: Final = 1e-6
"""Of a step: clocks have a resolution, and the state server divides by this."""


class RoundTimes:
    """The times of one training at one node: steps, an exchange, steps, an exchange."""

    def __init__(self, now: float) -> None:
        """Begin with the first step at `now`."""
        self._steps_began = now
        self._exchange_began = now
        self._exchange_s = 0.0

    def exchange_begins(self, steps: int, now: float) -> tuple[float, float]:
        """Record that the round's steps are done. Return the mean time of one, and how long the exchange
        before them took (0: there was none).
        """
        step_s = max(_SHORTEST_S, (now - self._steps_began) / steps)
        self._exchange_began = now
        return step_s, self._exchange_s

    def exchange_ends(self, now: float) -> None:
        """Record that the exchange, or one more part of it, is done, and the next steps begin."""
        self._exchange_s = max(0.0, now - self._exchange_began)
        self._steps_began = now
