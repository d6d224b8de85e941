"""Checks of all results of a simulated job that nodes leave and join. Pure.

Every result at every rank is the exact sum of the contributors that it names, and the same, bit for bit, as
at all ranks that are in the job. So is the state that programs compute from results. A process that is out,
and has not been told so yet, may have results that nobody else has; it is never in the job again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from netstorm.kvstore.operations import Operation
from netstorm.protocol.frames import checksum, ranks_in
from netstorm.simulation.elastic.values import ExactValues, KeyUse
from netstorm.simulation.node import SimulatedNode
from netstorm.simulation.pending import Array

__all__ = ["ResultChecks", "WrongResult"]


class WrongResult(AssertionError):
    """A result is not what it says that it is, or differs between ranks."""


class ResultChecks:
    """The checks of one job.

    Attributes:
        values: what ranks contribute.
        checked: how many results were checked.
        partial: how many of them name other contributors than all places of the job.
        mixed: how many of them have parts with different contributors.
    """

    def __init__(self, values: ExactValues, places: int, is_member: Callable[[SimulatedNode], bool]) -> None:
        """Begin without results.

        Args:
            values: what ranks contribute.
            places: most ranks of the job.
            is_member: returns whether a process is in the job, as the scheduler says.
        """
        self.values: Final = values
        self.checked = 0
        self.partial = 0
        self.mixed = 0
        self._is_member: Final = is_member
        self._all: Final = (1 << places) - 1
        self._seen: Final[dict[tuple[object, ...], list[tuple[SimulatedNode, int]]]] = {}
        self._begins: Final[dict[tuple[int, int], int]] = {}
        self._since: Final[dict[tuple[int, int], tuple[SimulatedNode, float]]] = {}
        """By rank and key: the first round to which this process has contributed."""

    def begin(self, node: SimulatedNode, rounds: Mapping[int, int]) -> None:
        """Record with which rounds, by key, the program of a newcomer begins."""
        self._begins.update({(id(node), key): first for key, first in rounds.items()})

    def result(
        self, node: SimulatedNode, key: KeyUse, round: int, operation: Operation, value: Array
    ) -> None:
        """Check one result.

        Raises:
            WrongResult: it is wrong.
        """
        self.checked += 1
        named = self._named(operation)
        where = f"round {round} of key {key.name!r} at rank {node.rank}"
        if sum(end - start for _, spans in named for start, end in spans) != value.size:
            raise WrongResult(
                f"{where} names the contributors of {operation.contributors}, not of all chunks"
            )
        if any(bits & ~self._all for bits, _ in named):
            raise WrongResult(f"{where} names ranks that the job never has: {self._text(named)}")
        expected = self.values.expected(key, named, round)
        if expected.tobytes() != value.ravel().tobytes():
            got = value.ravel()
            wrong = (expected != got).nonzero()[0][:8]
            raise WrongResult(
                f"{where} is not the sum of the ranks that it names, {self._text(named)}: elements "
                f"{wrong.tolist()} are {got[wrong].tolist()}, not {expected[wrong].tolist()}"
            )
        self._contributors(node, where, operation)
        self.same(node, ("result", key.name, round), value.tobytes() + self._text(named).encode())

    def call(
        self,
        node: SimulatedNode,
        what: tuple[str, int],
        operation: Operation,
        value: Array,
        expected: Callable[[set[int]], Array],
    ) -> None:
        """Check the result of a collective call, whose chunks may have different contributors.

        Args:
            node: at which it is.
            what: the call, and its step.
            operation: names the contributors.
            value: the result, flat, in float32.
            expected: returns the right result, if all chunks had these contributors.

        Raises:
            WrongResult: it is wrong.
        """
        self.checked += 1
        named = self._named(operation)
        where = f"{what[0]} of step {what[1]} at rank {node.rank}"
        right = np.full(value.size, np.nan, np.float32)
        for bits, spans in named:
            all_right = expected(set(ranks_in(bits)))
            for start, end in spans:
                right[start // 4 : end // 4] = all_right[start // 4 : end // 4]
        if right.tobytes() != value.tobytes():
            raise WrongResult(f"{where} is {value.tolist()}, not {right.tolist()}: {self._text(named)}")
        self._contributors(node, where, operation)
        self.same(node, ("call", *what), value.tobytes() + self._text(named).encode())

    def _contributors(self, node: SimulatedNode, where: str, operation: Operation) -> None:
        """Check that a rank that contributes goes on doing so, and count what is partial."""
        bits = set(operation.contributors)
        self.partial += bits != {self._all}
        self.mixed += len(bits) > 1
        own = [bool(one >> node.rank & 1) for one in bits]
        key = operation.key.identity
        known, first = self._since.get((node.rank, key), (node, math.inf))
        if known is not node:
            first = math.inf
        if operation.round > first + operation.key.rounds_under_way and not all(own):
            raise WrongResult(f"{where} is without this rank, which has contributed to round {first}")
        after = self._begins.get((id(node), key), 0) + 2 * operation.key.rounds_under_way
        if (
            any(own) and operation.round >= after
        ):  # before, the process that had the place before may be in it
            self._since[node.rank, key] = node, min(first, operation.round)

    def same(self, node: SimulatedNode, what: tuple[object, ...], content: bytes) -> None:
        """Check that something is the same at all ranks that are in the job.

        Raises:
            WrongResult: it differs.
        """
        if not self._is_member(node):
            return
        seen, digest = self._seen.setdefault(what, []), checksum(content)
        for other, known in seen:
            if known != digest and other.alive and self._is_member(other):
                raise WrongResult(f"{what} differs between ranks {other.rank} and {node.rank}")
        seen.append((node, digest))

    @staticmethod
    def _named(operation: Operation) -> list[tuple[int, list[tuple[int, int]]]]:
        bounds = operation.key.layout_of(operation.form).bounds
        return [
            (bits, [bounds[chunk] for chunk in ranks_in(chunks)])
            for bits, chunks in sorted(operation.contributors.items())
        ]

    @staticmethod
    def _text(named: list[tuple[int, list[tuple[int, int]]]]) -> str:
        return "; ".join(f"{ranks_in(bits)} in {spans}" for bits, spans in named)
