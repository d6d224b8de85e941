"""The timeline of each chunk on each link, as a file that ui.perfetto.dev and chrome://tracing open. Pure but
for writing the file.

One process a node; in it one row for its rounds and one for each link that it sends on. A link's row shows
what it delivers, one chunk after the other: a chunk begins where the one before it was acknowledged or, if
the link was empty, where it was handed over; so gaps are time in which nothing was under way. How long it
waited in the queue before, what its round trip was, and how full the window was, are in its arguments.

Nothing of this exists in a process without a trace: sessions are then made without it (`traced_sending`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from netstorm.protocol.frames import decode_body
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Part

__all__ = ["Delivery", "Trace", "join_traces", "trace_path"]

_MOST: Final = 1_000_000
"""Events that are kept, the latest: 200 bytes each."""

_ROUNDS: Final = 0
_FIRST_LINK: Final = 1
"""Numbers of rows: that of the rounds, and that of the link to rank 0."""

Event: TypeAlias = dict[str, Any]


class Delivery(NamedTuple):
    """One message that has been acknowledged. Times in s on the host's monotonic clock, sizes in bytes."""

    peer: Peer
    body: bytes
    """The encoded message, which says which chunk it is; decoded when the file is written."""
    size: int
    queued_at: float
    sent_at: float
    acknowledged_at: float
    transmissions: int
    in_flight: int
    """On the link when this was handed over, itself included."""
    window: int
    waiting: int
    """Messages that waited for their turn when it was handed over."""


class _Round(NamedTuple):
    key: str
    number: int
    began: float
    ended: float


class Trace:
    """What one process has done. One thread writes; when it is over, any may read."""

    def __init__(self, now: Callable[[], float], *, most: int = _MOST) -> None:
        """Begin.

        Args:
            now: the host's monotonic clock, in s.
            most: how many deliveries, and how many rounds, are kept; older ones are forgotten.
        """
        self.now: Final = now
        self._deliveries: Final[deque[Delivery]] = deque(maxlen=most)
        self._rounds: Final[deque[_Round]] = deque(maxlen=most)
        self.seen: int = 0
        """Deliveries so far, also those that are forgotten."""

    def deliver(self, delivery: Delivery) -> None:
        """Take note of a message that was acknowledged."""
        self.seen += 1
        self._deliveries.append(delivery)

    def round(self, key: str, number: int, began: float, ended: float) -> None:
        """Take note of an operation of this node's user."""
        self._rounds.append(_Round(key, number, began, ended))

    def as_json(self, rank: int, *, machine: str, cluster_offset_s: float) -> dict[str, Any]:
        """Return the trace in Chrome's format [1]_.

        Args:
            rank: of this node.
            machine: what all processes with this monotonic clock have in common.
            cluster_offset_s: the cluster clock minus the monotonic clock.

        References:
            .. [1] Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
        """
        events = [
            _named("process_name", f"rank {rank}", rank, 0),
            _named("thread_name", "rounds", rank, _ROUNDS),
        ]
        events += self._of_links(rank)
        events += self._of_rounds(rank)
        return {
            "displayTimeUnit": "ms",
            "otherData": {
                "rank": rank,
                "machine": machine,
                "cluster_offset_us": cluster_offset_s * 1e6,
                "forgotten": self.seen - len(self._deliveries),
            },
            "traceEvents": events,
        }

    def write(self, path: Path, rank: int, *, machine: str, cluster_offset_s: float) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        content = self.as_json(rank, machine=machine, cluster_offset_s=cluster_offset_s)
        path.write_bytes(msgspec.json.encode(content))

    def _of_links(self, rank: int) -> Iterator[Event]:
        last: dict[Peer, float] = {}
        for one in self._deliveries:
            part = decode_body(one.body)
            if not isinstance(part, Part):
                continue
            row = _FIRST_LINK + int(one.peer)
            if one.peer not in last:
                yield _named("thread_name", f"link {rank}→{one.peer}", rank, row)
            began = max(one.sent_at, last.get(one.peer, 0.0))
            last[one.peer] = one.acknowledged_at
            phase = part.phase.name.lower()
            yield {
                "ph": "X",
                "name": f"{phase} {part.chunk}",
                "cat": phase,
                "pid": rank,
                "tid": row,
                "ts": began * 1e6,
                "dur": (one.acknowledged_at - began) * 1e6,
                "args": {
                    "key": part.key,
                    "round": part.round,
                    "chunk": part.chunk,
                    "tree": part.tree,
                    "bytes": one.size,
                    "sent_us": one.sent_at * 1e6,
                    "queued_ms": (one.sent_at - one.queued_at) * 1e3,
                    "rtt_ms": (one.acknowledged_at - one.sent_at) * 1e3,
                    "in_flight": one.in_flight,
                    "window": one.window,
                    "waiting": one.waiting,
                    "transmissions": one.transmissions,
                },
            }
            yield {
                "ph": "C",
                "name": f"{rank}→{one.peer}",
                "pid": rank,
                "ts": one.sent_at * 1e6,
                "args": {"in flight": one.in_flight},
            }

    def _of_rounds(self, rank: int) -> Iterator[Event]:
        for place, one in enumerate(self._rounds):
            # Rounds of several keys overlap: asynchronous events, which viewers stack.
            common = {
                "name": f"{one.key} round {one.number}",
                "cat": "round",
                "id": f"{rank}.{place}",
                "pid": rank,
                "tid": _ROUNDS,
            }
            yield {**common, "ph": "b", "ts": one.began * 1e6}
            yield {**common, "ph": "e", "ts": one.ended * 1e6}


def _named(what: str, name: str, rank: int, row: int) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}


def trace_path(asked: str, rank: int) -> Path:
    """Return where a rank writes: its number stands before the suffix, since ranks may share a folder."""
    path = Path(asked)
    return path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")


def join_traces(paths: Sequence[Path], target: Path) -> None:
    """Write the traces of a job's nodes as one file.

    Nodes of one machine share a clock. Those of several are laid over each other by the cluster clock, as
    each of them had it at its end.

    Raises:
        OSError: a file cannot be read or written.
    """
    traces = [msgspec.json.decode(path.read_bytes()) for path in paths]
    together = len({trace["otherData"]["machine"] for trace in traces}) <= 1
    events: list[Event] = []
    for trace in traces:
        offset = 0.0 if together else float(trace["otherData"]["cluster_offset_us"])
        for event in trace["traceEvents"]:
            if offset and "ts" in event:
                event["ts"] += offset
                if "sent_us" in event.get("args", ()):
                    event["args"]["sent_us"] += offset
            events.append(event)
    target.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))
