"""State for a rank that has just joined: offered by the others, and fetched in pieces.

All of them are source-routed, as messages between two ranks are.
"""

from __future__ import annotations

from typing import TypeAlias

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = ["StateAsked", "StateMessage", "StateOffered", "StatePiece", "StateReceived", "StateWanted"]


class _Directed(Message, frozen=True):
    """Forwarded from node to node along its path."""

    path: tuple[int, ...]
    hop: int
    """Index in `path` of the node that the message is sent to."""


class StateWanted(_Directed, frozen=True, tag=120):
    """A newcomer to all ranks that have the job's state: it has none yet. With `done`: it has it."""

    done: bool = False


class StateOffered(_Directed, frozen=True, tag=121):
    """A rank to a newcomer: its state before a step of its program, of which pieces may be asked for."""

    step: int
    """Counts the steps of the program. Equal steps of two ranks have equal state."""
    nbytes: int
    crc: int
    """CRC-32C of all bytes."""
    rounds: dict[int, int]
    """By key: the first round of that step."""
    barriers: int
    """How many barriers come before the step."""


class StateAsked(_Directed, frozen=True, tag=122):
    """A newcomer to a rank: send these pieces."""

    step: int
    first: int
    count: int


class StateReceived(_Directed, frozen=True, tag=124):
    """A silent rank to another one: up to these rounds, by key, it has all results."""

    rounds: dict[int, int]


class StatePiece(DataMessage, frozen=True, tag=123):
    """One piece of the state, in frame 1."""

    path: tuple[int, ...]
    hop: int
    step: int
    piece: int


StateMessage: TypeAlias = StateReceived | StateWanted | StateOffered | StateAsked | StatePiece
