"""The timeline of each chunk on each link, as a file that ui.perfetto.dev and chrome://tracing open. Pure but
for reading and writing files.

Each node is a process of the trace, with one row for its rounds and one for each link that it sends on. A
link's row shows its chunks one after the other. A chunk begins when the one before it was acknowledged or,
on an empty link, when it was handed over. So a gap is time in which nothing was in flight. The arguments of
a chunk hold its time in the queue, its round-trip time, and how full the window was.

A process without a trace has none of this: its sessions are made without it (`TracedSendingHalf`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

import msgspec

from netstorm.errors import UsageError
from netstorm.observe.private_files import write_private
from netstorm.protocol.frames import Peer, decode_body
from netstorm.protocol.messages import Part

__all__ = ["Delivery", "Trace", "join_traces", "trace_path"]

_MOST: Final = 1_000_000
"""Most deliveries, and most rounds, that are kept: the latest. Each takes 200 bytes."""

_ROUNDS: Final = 0
"""Number of the row of the rounds."""

_FIRST_LINK: Final = 1
"""Number of the row of the link to rank 0."""


class TraceEvent(TypedDict, total=False):
    """An event of the Trace Event Format; its kind `ph` says which fields it has."""

    ph: str
    name: str
    cat: str
    id: str
    pid: int
    tid: int
    ts: float
    """In µs."""
    dur: float
    """In µs."""
    args: dict[str, str | int | float]


class _TraceSource(TypedDict):
    rank: int
    machine: str
    cluster_offset_us: float
    forgotten: int


class TraceContent(TypedDict):
    """The content of one node's trace file."""

    displayTimeUnit: str
    otherData: _TraceSource
    traceEvents: list[TraceEvent]


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
    """Bytes on the link when this was handed over, itself included."""
    window: int
    waiting: int
    """Messages in the queue when this was handed over."""


class _Round(NamedTuple):
    key: str
    number: int
    began: float
    ended: float


class Trace:
    """The trace of one process. One thread adds to it; once that has ended, any thread may read it."""

    def __init__(self, now: Callable[[], float], *, most: int = _MOST) -> None:
        """Begin.

        Args:
            now: the host's monotonic clock, in s.
            most: how many deliveries, and how many rounds, are kept; older ones are dropped.
        """
        self.now: Final = now
        self._deliveries: Final[deque[Delivery]] = deque(maxlen=most)
        self._rounds: Final[deque[_Round]] = deque(maxlen=most)
        self.recorded: int = 0
        """Deliveries so far, with those that are dropped."""

    def add_delivery(self, delivery: Delivery) -> None:
        """Add a message that was acknowledged."""
        self.recorded += 1
        self._deliveries.append(delivery)

    def add_round(self, key: str, number: int, began: float, ended: float) -> None:
        """Add an operation of this node's script."""
        self._rounds.append(_Round(key, number, began, ended))

    def as_json(self, rank: int, *, machine: str, cluster_offset_s: float) -> TraceContent:
        """Return the trace in Chrome's format [1]_.

        Args:
            rank: of this node.
            machine: identity of the host: the same for all processes with this monotonic clock.
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
                "forgotten": self.recorded - len(self._deliveries),
            },
            "traceEvents": events,
        }

    def write(self, path: Path, rank: int, *, machine: str, cluster_offset_s: float) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        content = self.as_json(rank, machine=machine, cluster_offset_s=cluster_offset_s)
        write_private(path, msgspec.json.encode(content))

    def _of_links(self, rank: int) -> Iterator[TraceEvent]:
        last: dict[Peer, float] = {}
        for delivery in self._deliveries:
            part = decode_body(delivery.body)
            if not isinstance(part, Part):
                continue
            row = _FIRST_LINK + int(delivery.peer)
            if delivery.peer not in last:
                yield _named("thread_name", f"link {rank}→{delivery.peer}", rank, row)
            began = max(delivery.sent_at, last.get(delivery.peer, 0.0))
            last[delivery.peer] = delivery.acknowledged_at
            phase = part.phase.name.lower()
            yield {
                "ph": "X",
                "name": f"{phase} {part.chunk}",
                "cat": phase,
                "pid": rank,
                "tid": row,
                "ts": began * 1e6,
                "dur": (delivery.acknowledged_at - began) * 1e6,
                "args": {
                    "key": part.key,
                    "round": part.round,
                    "chunk": part.chunk,
                    "tree": part.tree,
                    "bytes": delivery.size,
                    "sent_us": delivery.sent_at * 1e6,
                    "queued_ms": (delivery.sent_at - delivery.queued_at) * 1e3,
                    "rtt_ms": (delivery.acknowledged_at - delivery.sent_at) * 1e3,
                    "in_flight": delivery.in_flight,
                    "window": delivery.window,
                    "waiting": delivery.waiting,
                    "transmissions": delivery.transmissions,
                },
            }
            yield {
                "ph": "C",
                "name": f"{rank}→{delivery.peer}",
                "pid": rank,
                "ts": delivery.sent_at * 1e6,
                "args": {"in flight": delivery.in_flight},
            }

    def _of_rounds(self, rank: int) -> Iterator[TraceEvent]:
        for number, entry in enumerate(self._rounds):
            # Rounds of several keys overlap: asynchronous events, which viewers stack.
            common: TraceEvent = {
                "name": f"{entry.key} round {entry.number}",
                "cat": "round",
                "id": f"{rank}.{number}",
                "pid": rank,
                "tid": _ROUNDS,
            }
            yield {**common, "ph": "b", "ts": entry.began * 1e6}
            yield {**common, "ph": "e", "ts": entry.ended * 1e6}


def _named(what: str, name: str, rank: int, row: int) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}


def trace_path(setting: str, rank: int) -> Path:
    """Return the file of a rank: its number goes before the suffix, since ranks may share a folder."""
    path = Path(setting)
    return path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")


def join_traces(paths: Sequence[Path], target: Path) -> None:
    """Write the traces of a job's nodes as one file.

    Nodes of one machine share a clock. Traces of several machines are aligned by the cluster clock, as each
    node knew it at its end.

    Raises:
        OSError: a file cannot be read or written.
        UsageError: a file is no trace of a node.
    """
    traces = [_read(path) for path in paths]
    together = len({trace["otherData"]["machine"] for trace in traces}) <= 1
    events: list[TraceEvent] = []
    for trace in traces:
        offset = 0.0 if together else trace["otherData"]["cluster_offset_us"]
        for event in trace["traceEvents"]:
            if offset and "ts" in event:
                event["ts"] += offset
                sent_us = event.get("args", {}).get("sent_us")
                if isinstance(sent_us, float):
                    event["args"]["sent_us"] = sent_us + offset
            events.append(event)
    write_private(target, msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))


def _read(path: Path) -> TraceContent:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TraceContent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no trace of a NetStorm node: {error}") from None
