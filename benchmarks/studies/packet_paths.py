#!/usr/bin/env python3
"""Whether single packets gain by auxiliary paths, as MLT's have them: a prototype, simulated.

    python benchmarks/studies/packet_paths.py --json packet-paths.json       # about five minutes

Nodes with links between all pairs, whose rates are drawn from 2 to 20 Mbit/s. Those that leave the hub have
20, so that what takes time are contributions, which go as packets. Every rank pushes, waits for the sum, and
begins anew:

    star, fapt, packing  a star, one FAPT with the same root, and the default: many trees
    ..., packets         contributions go as packets, straight to the parent in the tree; else over TCP
    ..., paths           the same, and a lane's second and third channel lead over the two best relays; each
                         packet takes the channel with the shortest queue

Relaying a packet costs no time here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, number, writable
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.packets import PacketFaults
from netstorm.lab.simulation.process import host_of
from netstorm.protocol.messages import LossTerms
from netstorm.pslite.datagram.lanes import Packet
from netstorm.topology.network import Link, Network, Rank, Routing

_HUB: Final = Rank(0)
_TERMS: Final = LossTerms(bound=0.2, deadline_s=30.0)
"""Nothing is late: what is measured is how fast all packets get through."""
_FLOWS: Final = 1 << 42
"""Flows of relayed packets are numbered from here on; even, as all that leave their source."""
MODES: Final = tuple(
    f"{topology}, {way}" if way else topology
    for topology in ("star", "fapt", "packing")
    for way in ("", "packets", "paths")
)


def network(nodes: int, seed: int) -> Network:
    """Return nodes with links between all pairs, of rates that are drawn."""
    chance = random.Random(seed)
    links = [
        Link(
            source=Rank(a),
            target=Rank(b),
            rate=chance.uniform(2e6, 20e6) if a != _HUB else 20e6,
            latency=0.01,
        )
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    ]
    return Network(nodes=Network.uniform(nodes).nodes, links=tuple(links), routing=Routing.OVERLAY)


def relays(network: Network, source: int, target: int) -> list[int]:
    """Return the ranks between two others, those with the fastest slower link first."""
    rates: dict[tuple[int, int], float] = {(link.source, link.target): link.rate for link in network.links}
    between = [rank for rank in network.ranks if rank not in (source, target)]
    return sorted(between, key=lambda rank: -min(rates[source, rank], rates[rank, target]))


def give_paths(cluster: SimulatedCluster, network: Network) -> None:
    """Have packets of a lane's channels other than the first take two hops."""
    packets, ranks = cluster.packets, {host_of(rank): rank for rank in network.ranks}
    straight, model = packets._carry, cluster.link_model  # noqa: SLF001
    flows: dict[tuple[str, str, str], int] = {}

    def carry(source: str, port: int, target: tuple[str, int], data: bytes, late: bool) -> None:  # noqa: FBT001
        sockets = packets._sockets.get(target)  # noqa: SLF001
        channel = 0 if sockets is None else target[1] - sockets.ports[0]
        here, there = ranks.get(source), ranks.get(target[0])
        if sockets is None or not channel or here is None or there is None:
            straight(source, port, target, data, late)
            return
        relay = host_of(relays(network, here, there)[channel - 1])

        def hop(a: str, b: str, then: Callable[[], None]) -> None:
            flow = flows.setdefault((source, a, b), _FLOWS + 2 * len(flows))
            model.carry(flow, a, b, len(data) + 28, then)

        arrived = Packet(channel, data, source, port)
        hop(source, relay, lambda: hop(relay, target[0], lambda: sockets.deliver(arrived)))

    packets._carry = carry  # type: ignore[method-assign]  # noqa: SLF001


def measure(made: Network, mode: str, options: argparse.Namespace) -> float:
    """Return the mean seconds of a step."""
    topology, _, way = mode.partition(", ")
    cluster = SimulatedCluster(
        made.size,
        network=made,
        seed=1,
        chunk_size=options.chunk,
        topology=topology,
        packet_faults=PacketFaults(),
        loss_bound=_TERMS.bound if way else 0.0,
        datagrams=bool(way),
        **({} if topology == "packing" else {"num_roots": 1} if topology == "fapt" else {"hub": _HUB}),
    ).join()
    if way == "paths":
        give_paths(cluster, made)
    values = np.ones(options.size // 4, np.float32)
    for node in cluster.nodes:
        node.register("w", values.shape, "float32")
    times = []
    for _ in range(options.steps):
        began = cluster.now
        loss = _TERMS if way else None
        pending = [node.push("w", values.copy(), loss=loss) for node in cluster.nodes]
        cluster.run_until_ended(pending, 600)
        times.append(cluster.now - began)
    return statistics.fmean(times[options.steps // 3 :])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all modes on all networks, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--modes", type=lambda text: text.split("; "), default=list(MODES), help='with "; "')
    parser.add_argument("--nodes", type=number, default=5)
    parser.add_argument("--seeds", type=number, default=5)
    parser.add_argument("--size", type=amount, default=500_000)
    parser.add_argument("--chunk", type=number, default=16_384, help="elements")
    parser.add_argument("--steps", type=number, default=9, help="of which the first third does not count")
    parser.add_argument("--json", type=writable, help="file for the results")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for seed in range(1, options.seeds + 1):
        made = network(options.nodes, seed)
        row = {mode: round(measure(made, mode, options), 4) for mode in options.modes}
        rows.append({"seed": seed, **row})
        print(f"seed {seed}: " + ", ".join(f"{mode} {took:.3f} s" for mode, took in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
