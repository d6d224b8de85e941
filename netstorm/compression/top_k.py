"""The largest values of a gradient, and where they are; the rest waits. Pure.

`topk` is Deep Gradient Compression (Lin et al., arXiv 1712.01887): a rank sends the share of its values that
is largest, and adds the others to its next gradient, with momentum correction, local clipping and a warm-up
if asked. Sums are unions of the ranks' elements. `bsc` is GeoMX's Bi-Sparse compression: the result is
sparse, too. The root keeps as many elements as one rank has sent; all ranks see which are missing, and those
who have contributed to them take their values back, so nothing is lost.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from netstorm.compression.codec import Floats, Part, Place, Rounds, State, Transfer
from netstorm.compression.entries import Entries, decode_entries
from netstorm.errors import UsageError
from netstorm.protocol.codecs import sparse

__all__ = ["TopK", "bi_sparse"]

_SAMPLE: Final = 65_536
"""Values by which the threshold is estimated. With the largest percent of them its own error is 4 %."""

_FIRST_RATIO: Final = 0.25
"""With which a warm-up begins; section 3.3 of the paper."""

_MOST_KEPT: Final = 1000.0


class TopK:
    """Sparse values with error feedback."""

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        kept: float = 2.0,
        momentum: float = 0.0,
        clip: float = 0.0,
        warmup: int = 0,
        name: str = "topk",
    ) -> None:
        """Describe what is sent.

        Args:
            ratio: share of its values that a rank sends.
            kept: how many elements the result keeps, as a multiple of what a rank has sent on the average; 0:
                all. Without a limit results of many ranks have many times the elements.
            momentum: factor of momentum correction; the optimizer must have none then. 0: off.
            clip: largest norm of a rank's gradient of a tensor, times the square root of the number of ranks;
                0: any.
            warmup: gradients after which `ratio` is reached, from a quarter on, by equal factors.
            name: of the codec.

        Raises:
            UsageError: a value out of its range.
        """
        for what, value, right, allowed in (
            ("ratio", ratio, 0 < ratio <= 1, "more than 0, up to 1"),
            ("kept", kept, kept == 0 or 0.01 <= kept <= _MOST_KEPT, f"0, or from 0.01 to {_MOST_KEPT:g}"),
            ("momentum", momentum, 0 <= momentum < 1, "from 0 to less than 1"),
            ("clip", clip, 0 <= clip < np.inf, "0 or more"),
            ("warmup", warmup, warmup >= 0, "0 or more"),
        ):
            if not right:
                raise UsageError(f"{name} with {what}={value!r}: expected {allowed}")
        self.name: Final = name
        self.fingerprint: Final = (
            f"{name} ratio={ratio:g} kept={kept:g} momentum={momentum:g} clip={clip:g} warmup={warmup}"
        )
        self._ratio: Final = ratio
        self._codec: Final = sparse(kept)
        self._momentum: Final = np.float32(momentum)
        self._clip: Final = clip
        self._warmup: Final = warmup

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of all rounds."""
        return self._codec

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return no further keys."""
        return ()

    def rounds(self, gradient: Floats, state: State, place: Place) -> Rounds:
        """Send the largest values, in one round."""
        for name in ("residual", "velocity") if self._momentum else ("residual",):
            if name not in state:
                state[name] = np.zeros_like(gradient)
        residual, velocity = state["residual"], state["velocity"] if self._momentum else None
        with np.errstate(all="ignore"):
            self._clip_in_place(gradient, place.ranks)
            if velocity is not None:
                velocity *= self._momentum
                velocity += gradient
                residual += velocity
            else:
                residual += gradient
        numbers = _largest(residual, self._ratio_at(place.round))
        sent = residual[numbers]
        residual[numbers] = 0
        masked = None if velocity is None else velocity[numbers]
        if velocity is not None:
            velocity[numbers] = 0
        results: list[tuple[int, int, bytes, int]] = []
        yield Transfer(0, self._codec, Entries(numbers, sent), results)
        gradient[:] = 0
        lacking = np.ones(len(numbers), np.bool_)
        for start, end, payload, contributors in results:
            if payload is not None:
                found, _ = decode_entries(payload)
                gradient[start:end][found.numbers] = found.values
            if contributors >> place.rank & 1:
                low, high = np.searchsorted(numbers, (start, end))
                lacking[low:high] = gradient[numbers[low:high]] == 0
        with np.errstate(all="ignore"):
            residual[numbers[lacking]] += sent[lacking]
        if velocity is not None and masked is not None:  # what the model has not got keeps its momentum
            velocity[numbers[lacking]] = masked[lacking]

    def _ratio_at(self, round: int) -> float:
        if round >= self._warmup:
            return self._ratio
        first = max(_FIRST_RATIO, self._ratio)
        return float(first * (self._ratio / first) ** (round / self._warmup))

    def _clip_in_place(self, gradient: Floats, ranks: int) -> None:
        if self._clip:
            norm, most = float(np.linalg.norm(gradient)), self._clip / ranks**0.5
            if norm == np.inf:  # in float32
                norm = float(np.linalg.norm(gradient.astype(np.float64)))
            if norm > most:
                gradient *= np.float32(most / norm)


def bi_sparse(ratio: float = 0.01, *, momentum: float = 0.0) -> TopK:
    """Return GeoMX's Bi-Sparse compression: results have as many elements as one rank sends.

    Args:
        ratio: share of its values that a rank sends; GeoMX calls it the threshold.
        momentum: factor of momentum correction.

    Raises:
        UsageError: a value out of its range.
    """
    return TopK(ratio, kept=1.0, momentum=momentum, name="bsc")


def _largest(values: Floats, ratio: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the numbers of about the largest values, rising, without zeros. NaN is the largest of all."""
    magnitudes = np.abs(values)
    magnitudes[np.isnan(magnitudes)] = np.inf
    # An odd step: dimensions are often even, and the sample must have values of all rows and columns.
    sample = magnitudes if len(magnitudes) <= _SAMPLE else magnitudes[:: len(magnitudes) // _SAMPLE | 1]
    count = max(1, round(len(sample) * ratio))
    threshold = np.partition(sample, -count)[-count] if len(sample) else 0
    found = np.flatnonzero(magnitudes >= max(threshold, np.finfo(np.float32).smallest_subnormal))
    most = max(1, round(len(values) * ratio))
    if len(found) <= 2 * most:
        return found
    # Values that are all alike, or a sample that is not: exactly so many.
    return np.sort(found[np.argpartition(magnitudes[found], -most)[-most:]])
