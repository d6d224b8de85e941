"""Estimates the cluster clock from SNTP exchanges. Pure.

The local clock is monotonic; the cluster clock is the scheduler's. An exchange bounds their offset by half of
its round trip, and is exact if both directions took equally long. If another node answered, that node's own
error is added (the root dispersion of RFC 5905). So the fastest of the last exchanges counts (the clock
filter of RFC 5905, section 10), extrapolated by the drift between the two clocks.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from netstorm.errors import FrameError
from netstorm.pslite.clock import sntp

__all__ = ["ClockSync", "Exchange"]

_FILTER: Final = 8
"""Exchanges among which the fastest counts, as in RFC 5905."""

_HISTORY: Final = 64
"""Exchanges from which the drift is estimated: 17 minutes of them once polls are rare."""

_BURST_S: Final = 0.5
"""Time between polls while the filter is not full."""

_LONGEST_S: Final = 16.0
"""Two quartz clocks drift apart by up to 100 ppm: 1.6 ms in that time, before the drift is known."""

_WORST_DRIFT: Final = 500e-6
"""Beyond what any working clock does (RFC 5905 gives up there, too)."""

_UNKNOWN_DRIFT: Final = 15e-6
"""Growth of an exchange's error with its age (RFC 5905's PHI), in s/s."""

_OUTSTANDING: Final = 8
"""Most requests whose answers are still accepted."""

_LEAST_SPAN_S: Final = 120.0
"""Least time that exchanges must span for a drift estimate: queueing within seconds looks like hundreds of
ppm."""

_SIGNIFICANT: Final = 3.0
"""A drift counts if it is so many times its own standard error."""

_LEAST_ERROR_S: Final = 20e-6
"""Error of even the fastest exchange on a loopback."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and answer."""

    at: float
    """Local time of the answer's arrival."""
    offset: float
    """Cluster clock less local clock, if both directions took equally long; s."""
    delay: float
    """Round trip less the server's own time; the server's offset is within half of it. s."""
    error: float = 0.0
    """Most that the server's clock may be off the cluster clock: 0 at the scheduler. s."""
    hops: int = 0
    """Between the server's clock and the cluster clock."""


class ClockSync:
    """One process's estimate of the cluster clock. All times are in s; local ones are monotonic."""

    def __init__(self, *, seed: int) -> None:
        """Begin without an estimate. `seed` makes the nonces, which must not be guessed, and spreads the
        polls.
        """
        self._random: Final = random.Random(seed)
        self._outstanding: dict[float, float] = {}
        """Nonce -> local time of the request."""
        self._recent: deque[Exchange] = deque(maxlen=_FILTER)
        self._history: deque[Exchange] = deque(maxlen=_HISTORY)
        self._best: Exchange | None = None
        self._drift = 0.0
        self._poll_at = -math.inf
        self._interval = _BURST_S

    # ------------------------------------------------------------------------------------------- the clock

    @property
    def synchronised(self) -> bool:
        """Whether there was any exchange; before that, `offset` is 0 and means nothing."""
        return self._best is not None

    @property
    def drift(self) -> float:
        """How much faster the cluster clock runs than the local one, in s/s; 0: unknown."""
        return self._drift

    def offset(self, local: float) -> float:
        """Return what to add to the local time `local` to get the cluster's."""
        best = self._best
        return 0.0 if best is None else best.offset + self._drift * (local - best.at)

    def cluster_time(self, local: float) -> float:
        """Return the cluster clock's time at the local time `local`."""
        return local + self.offset(local)

    def error_bound(self, local: float) -> float:
        """Return by how much `offset` may be wrong at most, if the drift is right to 15 ppm."""
        return math.inf if self._best is None else _distance(self._best, local)

    @property
    def hops(self) -> int:
        """How many exchanges lie between this clock and the scheduler's; 0 before the first."""
        return 0 if self._best is None else self._best.hops + 1

    # ------------------------------------------------------------------------------------------- exchanges

    def next_poll(self) -> float:
        """Return the local time from which a request is due; it may be past."""
        return self._poll_at

    def poll(self, local: float) -> bytes:
        """Return a request to send now."""
        nonce = sntp.new_nonce(self._random.getrandbits(52))
        self._outstanding[nonce] = local
        if len(self._outstanding) > _OUTSTANDING:
            del self._outstanding[next(iter(self._outstanding))]
        full = len(self._recent) == _FILTER
        self._interval = min(2 * self._interval, _LONGEST_S) if full else _BURST_S
        # Nodes that were started together must not keep asking at the same time.
        self._poll_at = local + self._interval * self._random.uniform(0.9, 1.1)
        return sntp.request(nonce)

    def receive(self, data: bytes, local: float) -> Exchange:
        """Process an answer that arrived at the local time `local`.

        Raises:
            FrameError: it is not an answer to a recent request.
        """
        answer = sntp.read_answer(data)
        sent = self._outstanding.pop(answer.nonce, None)
        if sent is None:
            raise FrameError("an SNTP answer to a request that was not made, or long ago")
        served = answer.transmitted - answer.received
        exchange = Exchange(
            at=local,
            offset=((answer.received - sent) + (answer.transmitted - local)) / 2,
            delay=max(0.0, local - sent - served),
            error=answer.error,
            hops=answer.hops,
        )
        if served < 0 or served > local - sent + _LEAST_ERROR_S:
            raise FrameError(f"an SNTP server that took {served} s of a round trip of {local - sent} s")
        if self._contradicts(exchange):
            self._start_over()
        self._recent.append(exchange)
        self._history.append(exchange)
        self._drift = _drift(list(self._history))
        self._best = min(self._recent, key=lambda recent: _distance(recent, local))
        return exchange

    def _contradicts(self, new: Exchange) -> bool:
        """Return whether the bounds of two exchanges do not overlap: a clock was set, or a host was
        suspended.
        """
        if self._best is None:
            return False
        age = new.at - self._best.at
        best = self._best
        errors = new.error + best.error + (new.delay + best.delay) / 2
        allowed = errors + _WORST_DRIFT * age + _LEAST_ERROR_S
        return abs(new.offset - self.offset(new.at)) > allowed

    def _start_over(self) -> None:
        self._recent.clear()
        self._history.clear()
        self._poll_at = -math.inf


def _distance(exchange: Exchange, local: float) -> float:
    return exchange.error + exchange.delay / 2 + _UNKNOWN_DRIFT * abs(local - exchange.at) + _LEAST_ERROR_S


def _drift(exchanges: list[Exchange]) -> float:
    """Return the slope of the offsets over time, by least squares; 0 if it cannot be told from noise.

    An exchange has less weight the slower it was compared to the fastest one: the rest of its delay was
    queueing, in one direction or the other.
    """
    fastest = min(exchange.delay for exchange in exchanges)
    weights = [
        1.0 / (exchange.delay - fastest + _LEAST_ERROR_S + 0.1 * fastest) ** 2 for exchange in exchanges
    ]
    total = sum(weights)
    middle = sum(w * exchange.at for w, exchange in zip(weights, exchanges, strict=True)) / total
    mean = sum(w * exchange.offset for w, exchange in zip(weights, exchanges, strict=True)) / total
    spread = sum(w * (exchange.at - middle) ** 2 for w, exchange in zip(weights, exchanges, strict=True))
    if len(exchanges) < 3 or spread <= 0.0:
        return 0.0
    slope = (
        sum(
            w * (exchange.at - middle) * (exchange.offset - mean)
            for w, exchange in zip(weights, exchanges, strict=True)
        )
        / spread
    )
    span = max(exchange.at for exchange in exchanges) - min(exchange.at for exchange in exchanges)
    if span < _LEAST_SPAN_S:
        return 0.0
    # A weight is 1 / (error of the offset)², so 1 / sqrt(spread) is the slope's standard error. The weights
    # do not show it if even the fastest exchange was queued; so a drift must also move offsets by more than
    # exchanges differ.
    noise = sorted(exchange.delay for exchange in exchanges)[len(exchanges) // 2] - fastest + _LEAST_ERROR_S
    if not max(_SIGNIFICANT / math.sqrt(spread), noise / span) <= abs(slope) <= _WORST_DRIFT:
        return 0.0
    return slope
