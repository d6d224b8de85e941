"""Local steps (ESync): how long a node's steps take, and how many it may take before the next exchange."""

from __future__ import annotations

from netstorm.protocol.messages.kinds import Message

__all__ = ["StepTimes", "StepsGranted"]


class StepTimes(Message, frozen=True, tag=130):
    """A node to the scheduler: it has taken the local steps of a round, and begins to exchange."""

    training: int
    """The n-th of the process that balances its steps: the same at every node."""
    round: int
    """Counts the exchanges, from 0."""
    step_s: float
    """Mean duration of the round's local steps."""
    exchange_s: float = 0.0
    """Duration of the last exchange, with the wait for other nodes; 0 before the first."""
    least: int = 1
    """Fewest local steps of a round."""
    most: int = 1
    """Most local steps of a round."""


class StepsGranted(Message, frozen=True, tag=131):
    """The scheduler to a node: how many local steps it takes in the round after `round`."""

    training: int
    round: int
    steps: int
