"""What a training step spent its time on, as one rank sees it: computing, and waiting for whom.

A thread asks the node fifty times a second whom the oldest sum waits for. It begins with the first report, so
a program that wants none pays nothing.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from netstorm import clock
from netstorm.errors import Closed
from netstorm.kvstore.node import GeneralNode
from netstorm.units import format_bytes, format_duration

__all__ = ["StepMeter", "StepReport", "WatchedNode"]

T = TypeVar("T")


_EVERY_S: Final = 0.02
_ANSWER_S: Final = 5.0
"""An I/O thread that takes longer is not asked again: it has ended, or will never have time."""

_MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What happened at this rank since the report before.

    Attributes:
        seconds: since then.
        network_s: with a sum under way, whether or not the program computed meanwhile.
        compute_s: without one.
        ranks: seconds in which sums here lacked the contribution of a rank, by rank. A rank that is late is
            seen by its neighbours in the trees, and by those above them.
        links: seconds in which a sum or a result was to come over a link, by (source, this rank).
        bytes_sent: to other nodes, headers included.
        bytes_received: from them.
        policy: version of the newest policy.
        view: number of the view, in an elastic job.
    """

    seconds: float
    network_s: float
    ranks: dict[int, float]
    links: dict[tuple[int, int], float]
    bytes_sent: int
    bytes_received: int
    policy: int
    view: int

    @property
    def compute_s(self) -> float:
        """Seconds without a sum under way."""
        return max(0.0, self.seconds - self.network_s)

    def scalars(self, prefix: str = "netstorm/") -> dict[str, float]:
        """Return numbers by name, as trackers of experiments take them."""
        found: dict[str, float] = {
            "seconds": self.seconds,
            "network_s": self.network_s,
            "compute_s": self.compute_s,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "policy": self.policy,
            "view": self.view,
        }
        found |= {f"waiting_s/rank_{rank}": seconds for rank, seconds in self.ranks.items()}
        found |= {
            f"waiting_s/link_{source}_to_{target}": seconds
            for (source, target), seconds in self.links.items()
        }
        return {prefix + name: float(value) for name, value in found.items()}

    def __str__(self) -> str:
        """Return the report in words."""
        late = _largest({f"rank {rank}": seconds for rank, seconds in self.ranks.items()})
        over = _largest({f"{source}→{target}": seconds for (source, target), seconds in self.links.items()})
        return (
            f"{format_duration(self.seconds)}: sums under way for {format_duration(self.network_s)}, "
            f"{format_bytes(self.bytes_sent)} sent"
            + (f"; waited for {late}" if late else "")
            + (f"; for what comes over {over}" if over else "")
        )


class WatchedNode(Protocol):
    """A node at work in this process: a `Runtime`."""

    @property
    def node(self) -> GeneralNode:
        """The state machine."""

    def statistics(self) -> dict[str, float]:
        """See `Runtime`."""

    def ask(self, function: Callable[[GeneralNode], T]) -> concurrent.futures.Future[T]:
        """See `Runtime`."""


class StepMeter:
    """Makes the reports of one process. Any thread may call it."""

    def __init__(self, runtime: WatchedNode) -> None:
        """Begin to watch."""
        self._runtime: Final = weakref.ref(runtime)
        self._lock: Final = threading.Lock()
        self._ranks: Final[Counter[int]] = Counter()
        """Moments in which a rank was waited for."""
        self._links: Final[Counter[tuple[int, int]]] = Counter()
        self._asked = 0
        self._at = clock.monotonic()
        self._before = runtime.statistics()
        self._ended: Final = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="netstorm-steps", daemon=True)
        self._thread.start()

    def report(self, runtime: WatchedNode) -> StepReport:
        """Return what has happened since the last report, or since the beginning."""
        found, now = runtime.statistics(), clock.monotonic()
        with self._lock:
            ranks, links, asked = dict(self._ranks), dict(self._links), self._asked
            self._ranks.clear()
            self._links.clear()
            self._asked = 0
            before, self._before = self._before, found
            seconds, self._at = now - self._at, now
        network_s = min(seconds, found["network_s"] - before["network_s"])
        of_one = network_s / asked if asked else 0.0
        policy = runtime.node.policy
        return StepReport(
            seconds=seconds,
            network_s=network_s,
            ranks={rank: count * of_one for rank, count in sorted(ranks.items())},
            links={link: count * of_one for link, count in sorted(links.items())},
            bytes_sent=int(found["bytes_sent"] - before["bytes_sent"]),
            bytes_received=int(found["bytes_received"] - before["bytes_received"]),
            policy=0 if policy is None else policy.version,
            view=runtime.node.view,
        )

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            runtime = self._runtime()
            if runtime is None:
                return
            try:
                asked = runtime.ask(lambda node: (node.awaited(), node.outstanding(), node.rank))
                (ranks, neighbours), outstanding, own = asked.result(timeout=_ANSWER_S)
            except (Closed, concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                return
            del runtime
            with self._lock:
                self._asked += bool(outstanding)
                self._ranks.update(ranks)
                self._links.update((neighbour, own) for neighbour in neighbours)


def _largest(seconds: dict[str, float]) -> str:
    most = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST_NAMED]
    return ", ".join(f"{name} ({format_duration(spent)})" for name, spent in most if spent)
