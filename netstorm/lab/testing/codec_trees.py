"""Sums by a codec along random trees, in one process and without messages: for tests of codecs.

What a codec must keep shows here in milliseconds: every tree and every order of arrival gives the same sum,
to the last bit at all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from netstorm.compression.codec import Codec, Floats, GradientPlace, State, Transfer
from netstorm.kvstore.forms import Form, Key, Sum
from netstorm.protocol.frames import Buffer

__all__ = ["CodecTrees"]

Silent = Callable[[int, int], Collection[int]]
"""Returns who does not contribute to a chunk, by number of the round and first element."""


class CodecTrees:
    """The ranks of a job that sum gradients of one tensor.

    Attributes:
        states: what the codec keeps, by rank.
        payloads: bytes of the largest payload of each round of the last gradient.
    """

    def __init__(
        self, codec: Codec, shape: tuple[int, ...], ranks: int, *, chunk: int = 1 << 20, seed: int = 0
    ) -> None:
        """Begin without states.

        Args:
            codec: under which they sum.
            shape: of the tensor.
            ranks: how many there are.
            chunk: elements of one.
            seed: of trees and orders.
        """
        own = Key(0, "w", shape, "float32", form=codec.form(shape) or 0)
        parts = codec.parts(shape)
        self.states: Final[list[State]] = [{} for _ in range(ranks)]
        self.payloads: list[int] = []
        self._codec: Final = codec
        self._keys: Final = [own, *(Key(0, part.suffix, (part.elements,), "float32") for part in parts)]
        self._shape: Final = shape
        self._ranks: Final = ranks
        self._chunk: Final = chunk
        self._chance: Final = random.Random(seed)
        self._gradients = 0

    def sum(
        self,
        gradients: Sequence[Floats | None],
        *,
        silent: Silent | None = None,
    ) -> list[Floats]:
        """Return the sum as each rank has it, flat.

        Args:
            gradients: of each rank; None: its program has ended, so it contributes zeros.
            silent: who is not among the contributors, though it gets the sums.
        """
        flat = [None if one is None else np.array(one, np.float32).reshape(-1) for one in gradients]
        running = {
            rank: self._codec.rounds(values, self.states[rank], self._place(rank))
            for rank, values in enumerate(flat)
            if values is not None
        }
        self._gradients += 1
        self.payloads = []
        transfers: dict[int, Transfer] = {}
        fewest: int | None = None
        while running:
            for rank, rounds in tuple(running.items()):
                try:
                    transfers[rank] = next(rounds) if fewest is None else rounds.send(fewest)
                except StopIteration:
                    del running[rank]
                    transfers.pop(rank, None)
            if transfers:
                fewest = self._round(transfers, silent)
        return [values for values in flat if values is not None]

    def _place(self, rank: int) -> GradientPlace:
        return GradientPlace(self._shape, self._ranks, rank, self._gradients)

    def _round(self, transfers: dict[int, Transfer], silent: Silent | None) -> int:
        """Sum one round; return the fewest ranks that are in a chunk."""
        kinds = {(transfer.part, transfer.codec) for transfer in transfers.values()}
        if len(kinds) != 1:
            raise AssertionError(f"ranks are in different rounds: {sorted(kinds)}")
        ((part, codec),) = kinds
        key = self._keys[part]
        form = key.form_of(codec)
        if form is None:
            raise AssertionError(f"part {part} of the tensor never has codec {codec}")
        starts = list(range(0, key.elements, self._chunk))
        self._chance.shuffle(starts)
        number, counts = len(self.payloads), []
        self.payloads.append(0)
        for start in starts:
            end = min(key.elements, start + self._chunk)
            without = set() if silent is None else set(silent(number, start))
            result, contributors = self._sum_chunk(form, transfers, start, end, without)
            counts.append(contributors.bit_count())
            for transfer in transfers.values():
                form.write(transfer.destination, start, end, result, contributors)
                if transfer.counted is not None:
                    transfer.counted.append((start, end, contributors))
        return min(counts, default=0)

    def _sum_chunk(
        self, form: Form, transfers: dict[int, Transfer], start: int, end: int, without: set[int]
    ) -> tuple[Buffer | None, int]:
        """Return the root's result, and its contributors."""
        order = self._chance.sample(range(self._ranks), self._ranks)
        waiting: dict[int, list[tuple[Buffer | None, int]]] = {rank: [] for rank in order}
        for place in reversed(range(self._ranks)):
            rank, total = order[place], form.new_sum()
            arrivals: list[Any] = [*waiting[rank], *([] if rank in without else [None])]
            self._chance.shuffle(arrivals)
            for arrival in arrivals:
                if arrival is not None:
                    total.add_received(*arrival)
                elif rank in transfers:
                    total.add_own(form.own(transfers[rank].source, start, end), 1 << rank)
                else:
                    total.add_own(None, 1 << rank)
            if place == 0:
                return self._checked(form, total, total.to_keep(), end - start), total.contributors
            payload = self._checked(form, total, total.to_send(), end - start)
            if total.contributors:
                waiting[order[self._chance.randrange(place)]].append((payload, total.contributors))
        raise AssertionError("a job without ranks")

    def _checked(self, form: Form, total: Sum, payload: Buffer | None, elements: int) -> Buffer | None:
        """Return a copy of a payload that a neighbour accepts, as if it had travelled."""
        if payload is None:
            return None
        problem = form.problem(payload, elements, total.contributors)
        if problem is not None:
            raise AssertionError(f"a payload {problem}")
        copied = bytearray(payload)
        self.payloads[-1] = max(self.payloads[-1], len(copied))
        return copied
