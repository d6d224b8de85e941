#!/usr/bin/env python3
"""MLNET, Fig. 1a and 1b: 800 workers, 50 to 400 servers, trees (BINARY, RACK) against none (BASELINE).

    python benchmarks/papers/mlnet_fig1.py [--seeds N] [--json FILE]

A fluid model of the push (the pull is its mirror image): the most loaded link tells how long it takes. 1,024
hosts, eight to a rack, 128 racks in 16 pods, 64 core switches, all links 10 Gbit/s (a fat tree of the paper's
320 switches of 16 ports); each flow takes one of the equal paths, drawn at random (ECMP). Workers and servers
are on random hosts, servers beside workers only where no host is free.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from common import Row, arguments, report

_HOSTS: Final = 1024
_RACK: Final = 8
_RACKS_IN_POD: Final = 8
_UPLINKS: Final = 8
"""Of a rack's switch, and of each switch above it."""
_WORKERS: Final = 800
_SERVERS: Final = (50, 200, 300, 400)

Flows = list[tuple[int, int]]
"""(source, target), hosts."""
Shape = Callable[[random.Random, Sequence[int], int], Flows]


def main() -> None:
    """Print the tables."""
    options = arguments(__doc__ or "", seeds=2)
    rows = []
    for figure, oversubscribed in (("1a", 1.0), ("1b, 1:4", 4.0)):
        times = {
            (name, servers): statistics.median(
                _push_time(name, servers, oversubscribed, seed) for seed in range(options.seeds)
            )
            for name in SHAPES
            for servers in _SERVERS
        }
        for name in SHAPES:
            if name != "BASELINE":
                rows += [_row(figure, name, servers, times) for servers in _SERVERS]
    report("MLNET Fig. 1: time of a push over BASELINE's, 800 workers", rows, options)


def _row(figure: str, name: str, servers: int, times: dict[tuple[str, int], float]) -> Row:
    ratio = times[name, servers] / times["BASELINE", servers]
    paper = _PAPER.get((figure, name.partition(",")[0], servers), "-")
    return Row(
        what=f"{figure}: {name}, {servers} servers",
        paper=paper,
        ours=f"{ratio:.0%}",
        why=_WHY if paper != "-" else _NO_NUMBER,
        value=ratio,
    )


_PAPER: Final = {
    ("1a", "BINARY", 50): "22 %",
    ("1a", "RACK", 50): "42 %",
    ("1a", "BINARY", 300): "above 100 %",
    ("1a", "RACK", 300): "above 100 %",
    ("1a", "BINARY", 400): "above 100 %",
    ("1a", "RACK", 400): "above 100 %",
    ("1b, 1:4", "BINARY", 50): "34 %",
    ("1b, 1:4", "RACK", 50): "27 %",
    ("1b, 1:4", "BINARY", 400): "60 %",
    ("1b, 1:4", "RACK", 400): "29 %",
}
_WHY: Final = (
    "the paper's makespan includes computing, and it gives neither the part of it nor the size of a push, so "
    "only pushes are compared. Nor does it say how its trees are laid out. 42 % is what one aggregator a "
    "rack for all servers costs: 7 gradients into it, against 16 into a server; 22 % and 60 % are near what "
    "one binary tree by racks for all servers costs. Trees that differ from server to server gain more."
)
_NO_NUMBER: Final = "the paper's text has no number for it."


# ------------------------------------------------------------------------------------------------ who sends


def _direct(_draw: random.Random, workers: Sequence[int], server: int) -> Flows:
    return [(worker, server) for worker in workers]


def _by_rack(workers: Iterable[int]) -> list[list[int]]:
    racks: dict[int, list[int]] = {}
    for worker in workers:
        racks.setdefault(worker // _RACK, []).append(worker)
    return list(racks.values())


def _rack(draw: random.Random, workers: Sequence[int], server: int) -> Flows:
    """One worker of each rack adds up its rack's gradients and sends the sum to the server."""
    flows = []
    for members in _by_rack(workers):
        leader = draw.choice(members)
        flows += [(member, leader) for member in members if member != leader]
        flows.append((leader, server))
    return flows


def _binary(draw: random.Random, workers: Sequence[int], server: int) -> Flows:
    """A binary tree of all workers in random order, below the server."""
    order = list(workers)
    draw.shuffle(order)
    return [(worker, order[(place - 1) // 2] if place else server) for place, worker in enumerate(order)]


def _binary_by_rack(draw: random.Random, workers: Sequence[int], server: int) -> Flows:
    """A binary tree in each rack, and one of the racks, below the server."""
    racks = _by_rack(workers)
    draw.shuffle(racks)
    flows = []
    for members in racks:
        draw.shuffle(members)
        flows += [(member, members[(place - 1) // 2]) for place, member in enumerate(members) if place]
    heads = [members[0] for members in racks]
    flows += [(head, heads[(place - 1) // 2] if place else server) for place, head in enumerate(heads)]
    return flows


SHAPES: Final[dict[str, tuple[Shape, bool]]] = {
    "BASELINE": (_direct, False),
    "BINARY, one tree for all servers": (_binary, True),
    "BINARY, one by racks for all servers": (_binary_by_rack, True),
    "BINARY, a tree for each server": (_binary, False),
    "RACK, one aggregator for all servers": (_rack, True),
    "RACK, one for each server": (_rack, False),
}
"""By name: the flows for one server, and whether all servers have the same below them."""


# -------------------------------------------------------------------------------------------- what it loads


@dataclass(frozen=True, slots=True)
class Loads:
    """Gradients over each link: those of hosts, and those above."""

    hosts: npt.NDArray[np.float64]
    core: npt.NDArray[np.float64]


def loads(name: str, servers: int, seed: int) -> Loads:
    """Return what a push loads links with.

    Args:
        name: in `SHAPES`.
        servers: their number.
        seed: of places, trees and paths.
    """
    shape, same = SHAPES[name]
    draw = random.Random(f"hosts {seed}")
    hosts = draw.sample(range(_HOSTS), _HOSTS)
    workers, free = sorted(hosts[:_WORKERS]), hosts[_WORKERS:]
    shared = draw.sample(workers, max(0, servers - len(free)))
    flows: Flows = []
    for number, server in enumerate((free + shared)[:servers]):
        flows += shape(random.Random(f"trees {seed} {0 if same else number}"), workers, server)
    ends = np.array([flow for flow in flows if flow[0] != flow[1]])
    source, target = ends[:, 0], ends[:, 1]
    # Of equal paths each pair of hosts has one: a TCP connection that carries all of a tree's chunks.
    ways = np.random.default_rng(seed).integers(0, _UPLINKS, (2, len(ends)))
    rack, other_rack = source // _RACK, target // _RACK
    pod, other_pod = rack // _RACKS_IN_POD, other_rack // _RACKS_IN_POD
    leaves_rack, leaves_pod = rack != other_rack, pod != other_pod
    # A rack's switch picks the one above, which picks a core switch; the way down follows from both.
    up = rack[leaves_rack] * _UPLINKS + ways[0][leaves_rack]
    down = other_rack[leaves_rack] * _UPLINKS + ways[0][leaves_rack]
    way = ways[0][leaves_pod] * _UPLINKS + ways[1][leaves_pod]
    core_up = pod[leaves_pod] * _UPLINKS**2 + way
    core_down = other_pod[leaves_pod] * _UPLINKS**2 + way

    def of(links: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
        return np.concatenate([np.bincount(one, minlength=_HOSTS) for one in links]) / servers

    return Loads(of((source, target)), of((up, down, core_up, core_down)))


def _push_time(name: str, servers: int, oversubscribed: float, seed: int) -> float:
    """Return the load of the most loaded link, in gradients."""
    found = loads(name, servers, seed)
    return float(max(found.hosts.max(), found.core.max() * oversubscribed))


if __name__ == "__main__":
    main()
