"""What the papers' experiments share: networks, times of rounds, rows with the paper's figure and ours."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from netstorm.topology.files import tensors_of
from netstorm.topology.form import form_policy
from netstorm.topology.network import Change, Network, Routing, generate
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import predict

__all__ = [
    "ALEXNET",
    "CHUNK",
    "Row",
    "arguments",
    "changing",
    "form",
    "internet2",
    "near",
    "report",
    "round_time",
    "rounds",
    "star_times",
]

CHUNK: Final = 4_000_000
"""Bytes: the paper's CHUNK_SIZE of a million float32."""
ALEXNET: Final = tensors_of("alexnet")
_CHANGE_EVERY_S: Final = 180.0
"""NetStorm §IX-A."""
_LASTS_S: Final = 10 * _CHANGE_EVERY_S
_AHEAD_S: Final = 900.0
"""No round of 244 MB takes as long, the slowest star's included."""
_RATES: Final = (20e6, 155e6)
_LATENCY_S: Final = 0.030
_LOSS: Final = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of a paper and ours."""

    what: str
    paper: str
    ours: str
    why: str = ""
    """Why they differ, or why there is none of ours."""
    value: float | None = None
    """Ours as a number, for programs."""


def arguments(text: str, seeds: int = 10, lasts_s: float | None = None) -> argparse.Namespace:
    """Return the options that all scripts have, `seeds` and `json`, and `lasts` of those where nodes run."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help="how many networks are drawn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    if lasts_s is not None:
        what = "how long nodes run, in virtual seconds"
        parser.add_argument("--lasts", type=float, default=lasts_s, metavar="S", help=what)
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: expected at least 1")
    return options


def report(title: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the rows, and write them if that is wanted."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_edge=False)
    for heading in ("", "paper", "ours"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.what, row.paper, row.ours)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for why in dict.fromkeys(row.why for row in rows if row.why):
        named = [row.what for row in rows if row.why == why]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        console.print(f"- {'; '.join(named[:3])}{more}: {why}", highlight=False, markup=False)
    if options.json is not None:
        content = {"title": title, "seeds": options.seeds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def internet2(seed: int, nodes: int = 9) -> Network:
    """Return the paper's test-bed with rates drawn anew: it names neither its rates nor its links."""
    drawn = generate("internet2", nodes, seed)
    links = tuple(replace(link, latency=_LATENCY_S, loss=_LOSS) for link in drawn.links)
    return replace(drawn, links=links)


def changing(network: Network, seed: int, until_s: float = 5400.0) -> Network:
    """Return the network with rates that are drawn anew every three minutes, in both directions alike."""
    draw = random.Random(f"changes {seed}")
    changes = []
    for step in range(1, int(until_s / _CHANGE_EVERY_S) + 1):
        rates: dict[tuple[int, int], float] = {}
        for link in network.links:
            ends = (min(link.source, link.target), max(link.source, link.target))
            rate = rates.setdefault(ends, draw.uniform(*_RATES))
            at = step * _CHANGE_EVERY_S
            changes.append(Change(at=at, source=link.source, target=link.target, rate=rate))
    return replace(network, changes=tuple(changes))


def form(network: Network, topology: str, *, chunk: int = CHUNK, num_roots: int = 0, hub: int = -1) -> Policy:
    """Return a scheme's policy for a network as it is at its start.

    FAPT and MST are made of the overlay's links, as the paper's are: nodes aggregate wherever data pass.
    A star's and a balanced tree's edges are routes, which share links.
    """
    seen = replace(network.at(0.0), changes=())
    if topology in ("fapt", "mst"):
        seen = replace(seen, routing=Routing.OVERLAY)
    return form_policy(seen, topology, chunk_bytes=chunk, num_roots=num_roots, hub=hub, tensors=ALEXNET)


def round_time(
    network: Network,
    policy: Policy,
    tensors: Sequence[int] = ALEXNET,
    *,
    chunk: int = CHUNK,
    start: float = 0.0,
) -> float:
    """Return the predicted seconds of one round."""
    return predict(network, policy, tensors, chunk_bytes=chunk, start=start).seconds


def rounds(network: Network, policy: Policy | None = None) -> float:
    """Return the mean seconds of a round while a network goes through ten states, half an hour.

    Args:
        policy: the trees throughout; None: an N-root FAPT, formed before each round from the rates of then.
    """
    now, number = 0.0, 0
    while now < _LASTS_S:
        here = near(network, now)
        now += round_time(here, policy or form(here, "fapt"), start=now)
        number += 1
    return now / number


def near(network: Network, now: float) -> Network:
    """Return the network without what is over, and what comes after any round: it takes time to look at."""
    here = network.at(now)
    return replace(here, changes=tuple(change for change in here.changes if change.at <= now + _AHEAD_S))


def star_times(network: Network) -> tuple[float, float]:
    """Return a star's time with the best hub, and its mean over all hubs: the paper names no hub."""
    times = [round_time(network, form(network, "star", hub=hub)) for hub in network.ranks]
    return min(times), statistics.fmean(times)
