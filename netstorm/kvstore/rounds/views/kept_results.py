"""Results that a node keeps for others, in jobs that nodes may leave. Pure.

A node that has a result may be the only one: the others' copies were lost with the node that forwarded them.
So each keeps its results until all contributors are known to have completed the round. Results are the
payloads that were received or are forwarded, so they cost memory, and no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from netstorm.kvstore.values.form import Form
from netstorm.protocol.frames import Buffer

__all__ = ["KeptResult", "KeptResults", "RoundOfResults"]


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The result of one chunk."""

    payload: Buffer | None
    """None: zeros."""
    contributors: int
    """Bit set of the ranks that are in it."""


@dataclass(slots=True)
class RoundOfResults:
    """What is kept of one round."""

    form: Form
    call: int
    chunks: dict[int, KeptResult] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    """Chunks whose results were formed and are not here, since no rank wants them from here."""


class KeptResults:
    """The results that one node keeps, by key and round."""

    def __init__(self) -> None:
        self._rounds: Final[dict[int, dict[int, RoundOfResults]]] = {}
        self._settled: Final[dict[int, int]] = {}

    def add(
        self,
        key: int,
        round: int,
        chunk: int,
        result: KeptResult | None,
        *,
        form: Form,
        call: int,
        settled: int,
    ) -> None:
        """Keep a result, and drop those of rounds up to `settled`, which all contributors have completed.

        Args:
            key: the key.
            round: its round.
            chunk: the chunk.
            result: None: it has been formed, and is not here.
            form: of the round.
            call: digest of the collective call; 0: none.
            settled: up to this round, all contributors have completed all.
        """
        rounds = self._rounds.setdefault(key, {})
        found = rounds.get(round)
        if found is None:
            found = rounds[round] = RoundOfResults(form, call)
        found.form = form
        if result is None:
            found.known.add(chunk)
        else:
            found.chunks[chunk] = result
        if settled > self._settled.get(key, -1):
            self._settled[key] = settled
            for old in [number for number in rounds if number <= settled]:
                del rounds[old]

    def of(self, key: int, round: int) -> RoundOfResults | None:
        """Return what is kept of a round; None: nothing."""
        return self._rounds.get(key, {}).get(round)

    def forget_before(self, key: int, round: int) -> None:
        """Drop the results of all rounds of a key before `round`."""
        rounds = self._rounds.get(key, {})
        for old in [number for number in rounds if number < round]:
            del rounds[old]

    def __iter__(self) -> Iterator[tuple[int, int, RoundOfResults]]:
        for key, rounds in self._rounds.items():
            for number, kept in rounds.items():
                yield key, number, kept

    def clear(self) -> None:
        """Drop everything."""
        self._rounds.clear()
