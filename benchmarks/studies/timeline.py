#!/usr/bin/env python3
"""Where the time of a round goes: sums up the timeline of each chunk on each link.

    NETSTORM_TRACE=trace.json netstorm launch -n 4 -- python train.py
    python benchmarks/studies/timeline.py trace.*.json

    netstorm bench wan NETWORK.yaml --systems netstorm-packing --trace trace.json
    python benchmarks/studies/timeline.py trace.json --network NETWORK.yaml

For each link of one round: its bytes and the rate over the whole round, as a share of the link's rate; when
its first chunk was handed over and its last one acknowledged; the time in which nothing was under way; the
median round trip; how often chunks waited while the window was full, and how long in the queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from netstorm.observe.trace import join_traces
from netstorm.topology.files import load_network
from netstorm.topology.network import Network, Rank

Event = dict[str, Any]
Link = tuple[int, int]

_TOP = 12
_HEADINGS = (
    *(
        "link",
        "MB",
        "Mbit/s",
        "of rate",
        "first",
        "last",
        "idle",
        "RTT ms",
        "least",
        "window kB",
        "flying kB",
    ),
    *("full", "queued ms", "again"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of one round, and return the exit code."""
    parser = argparse.ArgumentParser(description="Where a round's time goes.")
    parser.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE.json",
        help="of a job's nodes (NETSTORM_TRACE), or the one of netstorm bench wan --trace",
    )
    parser.add_argument("--network", type=Path, metavar="FILE", help="for the links' rates")
    parser.add_argument("--rates-scale", type=float, default=1.0, metavar="X", help="as in the benchmark")
    parser.add_argument("--round", type=int, metavar="N", help="which one; default the last")
    parser.add_argument(
        "--links", type=int, default=_TOP, metavar="N", help=f"how many links; default {_TOP}"
    )
    options = parser.parse_args(arguments)
    chunks = [event for event in _events(options.traces) if event["ph"] == "X"]
    if not chunks:
        print(f"error: no chunks in {', '.join(map(str, options.traces))}", file=sys.stderr)
        return 1
    number = max(event["args"]["round"] for event in chunks) if options.round is None else options.round
    network = None if options.network is None else load_network(options.network)
    show(chunks, number, Console(width=140), network=network, scale=options.rates_scale, most=options.links)
    return 0


def _events(traces: Sequence[Path]) -> list[Event]:
    if len(traces) == 1:
        return list(json.loads(traces[0].read_text(encoding="utf-8"))["traceEvents"])
    with tempfile.TemporaryDirectory() as folder:
        joined = Path(folder, "joined.json")
        join_traces(traces, joined)  # aligns the clocks of several machines
        return _events([joined])


def of_round(chunks: list[Event], number: int) -> tuple[float, float, dict[Link, list[Event]]]:
    """Return beginning and end of a round in µs, and its chunks by link in order of their ends."""
    links: dict[Link, list[Event]] = defaultdict(list)
    for event in chunks:
        if event["args"]["round"] == number:
            links[event["pid"], event["tid"] - 1].append(event)
    for on_link in links.values():
        on_link.sort(key=_end)
    everything = [event for on_link in links.values() for event in on_link]
    began = min(event["args"]["sent_us"] - event["args"]["queued_ms"] * 1e3 for event in everything)
    return began, max(map(_end, everything)), links


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def show(
    chunks: list[Event], number: int, console: Console, *, network: Network | None, scale: float, most: int
) -> None:
    """Print the busiest links of a round."""
    began, ended, links = of_round(chunks, number)
    seconds = (ended - began) / 1e6
    table = Table(title=f"round {number}: {seconds:.3f} s until the last acknowledgement")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    shares: dict[Link, float] = {}
    for link, on_link in links.items():
        bits = 8 * sum(event["args"]["bytes"] for event in on_link)
        rate = None
        if network is not None:
            rate = network.link(Rank(link[0]), Rank(link[1])).rate * scale
        shares[link] = bits / (ended - began) * 1e6 / (rate or 1.0)
    for link in sorted(links, key=lambda link: -shares[link])[:most]:
        on_link = links[link]
        details = [event["args"] for event in on_link]
        total = sum(detail["bytes"] for detail in details)
        busy = sum(event["dur"] for event in on_link)
        first = min(detail["sent_us"] for detail in details)
        full = sum(
            detail["waiting"] > 0 and detail["in_flight"] + detail["bytes"] > detail["window"]
            for detail in details
        )
        table.add_row(
            f"{link[0]}→{link[1]}",
            f"{total / 1e6:.2f}",
            f"{8 * total / (ended - began):.1f}",
            f"{shares[link]:.0%}" if network is not None else "",
            f"{(first - began) / 1e3:.0f} ms",
            f"{(_end(on_link[-1]) - began) / 1e3:.0f} ms",
            f"{(ended - began - busy) / 1e3:.0f} ms",
            f"{statistics.median(detail['rtt_ms'] for detail in details):.0f}",
            f"{min(detail['rtt_ms'] for detail in details):.0f}",
            f"{statistics.median(detail['window'] for detail in details) / 1e3:.0f}",
            f"{statistics.median(detail['in_flight'] for detail in details) / 1e3:.0f}",
            f"{full / len(details):.0%}",
            f"{statistics.median(detail['queued_ms'] for detail in details):.0f}",
            str(sum(detail["transmissions"] - 1 for detail in details)),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
