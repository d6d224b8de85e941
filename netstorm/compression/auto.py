"""The codec that changes gradients least and still keeps the network from being what a step waits for. Pure.

All tensors of a store together occupy the network for a while in each step, and leave it idle while the
program computes. Each rank measures both. Every few gradients of a tensor the ranks agree on what they have
measured: the shortest occupation of any rank, since the others have waited for that one, and the longest
computation. With both at hand, each rank makes the same choice for that tensor. A first measurement comes
without compression, so what other codecs would take can be told from their bytes; later ones correct that,
since latency does not shrink.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np

from netstorm.compression.codec import (
    AGREED,
    Codec,
    Float16,
    Floats,
    GradientPlace,
    Rounds,
    State,
    SubKey,
    Transfer,
    Uncompressed,
)
from netstorm.compression.power_sgd import PowerSGD
from netstorm.compression.quantised import Int8
from netstorm.compression.sparse import Entries, decode_entries
from netstorm.errors import UsageError
from netstorm.protocol.codecs import MAXIMA, encoded_fraction, sparse

__all__ = ["NAMES", "Auto", "Candidates", "Choice", "NetworkUse", "choose"]

_log = logging.getLogger(__name__)

_KEPT: Final = 32
"""Measurements of the network's use that count: those of the last steps."""

_UNKNOWN: Final = -1.0

_HEAD: Final = 3
"""Elements before those of the candidates: the choice, gradients so far, bytes of the last candidate."""

_MARGIN: Final = 0.9
"""Of the time that counts as faster: between two measurements of the same codec there are about 10 %."""

_FORGOTTEN: Final = 8
"""Decisions after which a time counts no more: the network may have changed."""


_RANK: Final = 16
"""Of PowerSGD. With 4, the codec's default, short trainings lose 2 points of accuracy (docs/benchmarks)."""

_ENTRY: Final = 1.25
"""An entry's bytes, of those of its value: it has a number, too."""

NAMES: Final = ("none", "fp16", "int8", f"powersgd rank={_RANK}")
"""Of the codecs to choose from, the one that changes gradients least first. Those that send fewer bytes, topk
and bsc, learn far more slowly for hundreds of steps (docs/data/accuracy-digits.json, accuracy-gpt.json).
"""


class Candidates:
    """The codecs to choose from, in the order of `NAMES`."""

    def __init__(self) -> None:
        """Make them."""
        self._int8: Final = Int8()
        self._mild: Final = (Uncompressed(), Float16(), self._int8)
        self._factors: Final = _SparseFirst(_RANK)

    def of(self, shape: tuple[int, ...]) -> tuple[Codec, ...]:
        """Return those of a tensor. Where PowerSGD's factors are not smaller than whole numbers of 8 bits,
        the last is `int8` once more.
        """
        last = self._factors if self._factors.fraction(shape) < _fraction(self._int8, shape) else self._int8
        return (*self._mild, last)

    def fractions(self, shape: tuple[int, ...]) -> list[float]:
        """Return about which part of the bytes of a tensor's values each of them sends."""
        return [_fraction(codec, shape) for codec in self.of(shape)]


def _fraction(codec: Codec, shape: tuple[int, ...]) -> float:
    if isinstance(codec, _SparseFirst):
        return codec.fraction(shape)
    return encoded_fraction(codec.form(shape) or 0)


class _SparseFirst(PowerSGD):
    """PowerSGD for a tensor whose own key has a round in each gradient, as `Auto` needs it: the left factor
    travels there, spread over its chunks.
    """

    def fraction(self, shape: tuple[int, ...]) -> float:
        """Return about which part of the bytes of a tensor's values both factors have; 1: it is no matrix, or
        a small one.
        """
        parts = super().parts(shape)
        if not parts:
            return 1.0
        left, right = (part.elements for part in parts)
        return (_ENTRY * left + right) / int(np.prod(shape, dtype=np.int64))

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of the tensor's own rounds."""
        return sparse(0)

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return the key of the right factor."""
        return super().parts(shape)[1:]

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum the left factors as entries of the tensor, then the right ones."""
        rounds = super().rounds(gradient, state, place)
        first = next(rounds)
        left: Floats = first.destination
        stride = len(gradient) // len(left)
        results: list[tuple[int, int, bytes | None, int]] = []
        numbers = np.arange(len(left)) * stride
        ranks = yield Transfer(0, sparse(0), Entries(numbers, left.copy()), results)
        left[:] = 0
        for start, _, payload, _ in results:
            if payload is not None:
                found, _ = decode_entries(payload)
                left[(start + found.numbers) // stride] = found.values
        right = rounds.send(ranks)
        ranks = yield right._replace(part=1)
        with contextlib.suppress(StopIteration):
            rounds.send(ranks)


class Choice(NamedTuple):
    """A codec, and why."""

    place: int
    """Among the candidates."""
    times: tuple[float, ...]
    """Expected occupation of the network in a step, in s, by candidate."""


def choose(
    known: Mapping[int, float], fractions: Sequence[float], compute_s: float, current: int = 0
) -> Choice:
    """Return the first candidate with which the network takes no longer than the program computes; else the
    fastest. Measurements differ each time, so one that sends more than the current one must be faster than
    that by a margin, and so must one that is no more than faster.

    Args:
        known: seconds of the network in a step, by candidate that has been measured; at least one.
        fractions: about which part of the bytes of plain values each candidate has.
        compute_s: seconds that the program computes in a step.
        current: the candidate that is in use.
    """
    fixed, plain = _line([(fractions[place], seconds) for place, seconds in known.items()])
    times = tuple(known.get(place, fixed + plain * fraction) for place, fraction in enumerate(fractions))
    fitting = [
        place
        for place, seconds in enumerate(times)
        if seconds <= compute_s * (_MARGIN if place < current else 1)
    ]
    if fitting:
        return Choice(fitting[0], times)
    fastest = int(np.argmin(times))
    return Choice(fastest if times[fastest] < _MARGIN * times[current] else current, times)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the line through points, by least squares; through the origin if there is one point."""
    fractions, seconds = zip(*points, strict=True)
    if len(points) > 1 and min(fractions) < max(fractions):
        slope, fixed = statistics.linear_regression(fractions, seconds)
        if slope > 0 and fixed >= 0:
            return fixed, slope
    most = max(range(len(points)), key=lambda place: fractions[place])
    return 0.0, seconds[most] / fractions[most]


class _Agreed:
    """What ranks have agreed on for one tensor: a view of what the state has under `AGREED`."""

    __slots__ = ("_head", "ages", "times")

    def __init__(self, state: State, candidates: int) -> None:
        """Begin, if the state has nothing of that many candidates: with the first of them."""
        kept = state.get(AGREED)
        # One element more than before, so that a checkpoint with another last candidate is not taken.
        if kept is None or kept.shape != (_HEAD + 2 * candidates,):
            kept = state[AGREED] = np.full(_HEAD + 2 * candidates, _UNKNOWN)
            kept[:_HEAD] = 0
        self._head: Final = kept[:_HEAD]
        self.times: Final = kept[_HEAD : _HEAD + candidates]
        """Of each candidate its last time, in s."""
        self.ages: Final = kept[_HEAD + candidates :]
        """How many decisions ago each was measured."""

    @property
    def chosen(self) -> int:
        """The place of the codec among the candidates."""
        return int(self._head[0])

    @chosen.setter
    def chosen(self, place: int) -> None:
        self._head[0] = place

    @property
    def factors(self) -> float:
        """About which part of the bytes of all tensors the last candidate sends."""
        return float(self._head[2])

    @factors.setter
    def factors(self, part: float) -> None:
        self._head[2] = part

    def next_gradient(self) -> int:
        """Count a gradient, and return its number."""
        self._head[1] += 1
        return int(self._head[1]) - 1


class NetworkUse:
    """When the network is occupied by a store's sums, and how long the program computes between them."""

    def __init__(self) -> None:
        self._under_way = 0
        self._is_void = False
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._busy: Final[deque[float]] = deque(maxlen=_KEPT)
        self._idle: Final[deque[float]] = deque(maxlen=_KEPT)

    def begin(self, now: float) -> None:
        """Note the begin of a sum."""
        if not self._under_way:
            if self._ended_s is not None:
                self._idle.append(now - self._ended_s)
            self._began_s = now
        self._under_way += 1

    def end(self, now: float) -> None:
        """Note the end of a sum."""
        self._under_way -= 1
        if not self._under_way:
            self._ended_s = now
            if self._is_void:
                self._busy.clear()
                self._is_void = False
            else:
                self._busy.append(now - self._began_s)

    def forget(self) -> None:
        """Forget the times of the network once the sums under way have ended, since it carries other bytes
        from then on. Those that end together decide by the same times.
        """
        self._is_void = True

    def typical(self) -> tuple[float, float]:
        """Return the medians of the network's and the program's time in a step, in s; -1: not known yet."""
        busy = statistics.median(self._busy) if self._busy else -1.0
        return busy, statistics.median(self._idle) if self._idle else -1.0


class Auto:
    """Another codec, chosen anew every few gradients. One object serves a store, and measures for it."""

    name: ClassVar[str] = "auto"

    def __init__(self, every: int = 16) -> None:
        """Describe the choice.

        Args:
            every: gradients of a tensor from one choice to the next.

        Raises:
            UsageError: less than 1.
        """
        if every < 1:
            raise UsageError(f"auto with every={every!r}: expected 1 or more")
        self._every: Final = every
        self._candidates: Final = Candidates()
        self._plain = self._factors = 0.0
        """Bytes of all gradients so far, and those that the last candidate would have sent for them."""
        self._use: Final = NetworkUse()
        self.fingerprint: Final = f"auto every={every}"
        self._said = ""
        """The name of the codec that the news were of last."""
        self._news = ""

    def take_news(self) -> str:
        """Return which codec was chosen, and why, for a person, since this was called last; empty: nothing is
        new.
        """
        news, self._news = self._news, ""
        return news

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec that the first gradient has."""
        return 0

    def parts(self, shape: tuple[int, ...]) -> tuple[SubKey, ...]:
        """Return the key of what is agreed, and those of the candidates."""
        codecs = dict.fromkeys(self._candidates.of(shape))
        parts = (part for codec in codecs for part in codec.parts(shape))
        return SubKey("times", 3, in_each=False), *(part._replace(in_each=False) for part in parts)

    def rounds(self, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Agree on a codec if it is time to, and sum by it."""
        self._use.begin(place.now())
        try:
            agreed = _Agreed(state, len(NAMES))
            self._plain += len(gradient)
            self._factors += len(gradient) * self._candidates.fractions(place.shape)[-1]
            if agreed.next_gradient() % self._every == 0:
                busy, idle = self._use.typical()
                # Maxima: of a negative time, so the shortest one counts. Unknown ones are the largest and the
                # smallest. All tensors choose by the same bytes, those of the store, since their times are.
                part = self._factors / max(1.0, self._plain)
                times = np.array([-busy if busy > 0 else -np.inf, idle, part], np.float32)
                yield Transfer(1, MAXIMA, times, times)
                agreed.factors = float(times[2])
                self._decide(agreed, float(-times[0]), float(times[1]))
            codec = self._candidates.of(place.shape)[agreed.chosen]
            yield from self._sum(codec, gradient, state, place)
        finally:
            self._use.end(place.now())

    def _sum(self, codec: Codec, gradient: Floats, state: State, place: GradientPlace) -> Rounds:
        """Sum by a codec, whose further keys come after those of the candidates before it."""
        before = 1
        for other in self._candidates.of(place.shape):
            if other is codec:
                break
            before += len(other.parts(place.shape))
        # What one codec has not sent yet, the next one sends.
        rounds = codec.rounds(gradient, state, place)
        residual = state.get("residual")
        if residual is not None and isinstance(codec, Uncompressed):
            gradient += residual
            residual[:] = 0
        answer: int | None = None
        while True:
            try:
                transfer = next(rounds) if answer is None else rounds.send(answer)
            except StopIteration:
                return
            answer = yield transfer._replace(part=transfer.part + before if transfer.part else 0)

    def _decide(self, agreed: _Agreed, busy_s: float, compute_s: float) -> None:
        """Choose, by what all ranks have agreed on."""
        chosen = agreed.chosen
        agreed.ages[:] += 1
        agreed.times[agreed.ages > _FORGOTTEN] = _UNKNOWN
        if not np.isfinite(busy_s) or busy_s <= 0 or compute_s < 0:
            return
        agreed.times[chosen], agreed.ages[chosen] = busy_s, 0
        found = choose(
            {number: float(seconds) for number, seconds in enumerate(agreed.times) if seconds >= 0},
            [*self._candidates.fractions(())[:-1], agreed.factors],
            compute_s,
            chosen,
        )
        if found.place != chosen:
            agreed.chosen = found.place
            self._use.forget()
        name = NAMES[found.place]
        if name != self._said:
            self._said, self._news = name, self._reason(found, compute_s)
            _log.info("gradients travel by codec auto: %s", self._news)

    def _reason(self, choice: Choice, compute_s: float) -> str:
        times = ", ".join(
            f"{name} {seconds:.2g} s" for name, seconds in zip(NAMES, choice.times, strict=True)
        )
        fits = choice.times[choice.place] <= compute_s
        why = "which takes no longer" if fits else "the fastest, since all take longer"
        return f"{NAMES[choice.place]} ({why}). A step computes for {compute_s:.2g} s; its sums take: {times}"
