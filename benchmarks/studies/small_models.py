#!/usr/bin/env python3
"""Small models over roots and owners: seconds of a round and of a clock, simulated.

python benchmarks/studies/small_models.py --json small-models.json

A model of ten tensors, 79 KB in all, on random networks: synchronous rounds by topology, and clocks of
asynchronous training, in which all ranks push and pull each tensor at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import factor, number, numbers
from netstorm.lab.simulation.asynchronous import AsynchronousStore
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.topology.form import form_policy
from netstorm.topology.network import FAMILIES, Network, generate

_TENSORS: Final = (450, 18, 5_000, 50, 1_250, 25, 10_500, 84, 2_200, 180)
"""Elements, about those of a small convolutional network."""
_LIMIT_S: Final = 600.0
_TOPOLOGIES: Final = ("fapt", "hierarchical", "packing")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print the means over seeds, and return the exit code."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    for family in sorted(FAMILIES):
        for topology in _TOPOLOGIES:
            found = [
                round_and_clock(
                    generate(family, options.nodes, seed).scaled(options.rates_scale),
                    topology,
                    options.steps,
                    seed,
                )
                for seed in options.seeds
            ]
            row = {key: statistics.fmean(one[key] for one in found) for key in found[0]}
            rows.append({"family": family, "topology": topology, **row})
            print(
                f"{family:10} {topology:12} round {1000 * row['round_s']:6.1f} ms  clock "
                f"{1000 * row['clock_s']:6.1f} ms, {row['owners']:.1f} owners",
                flush=True,
            )
    if options.json:
        content = {"options": {**vars(options), "json": None}, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def round_and_clock(network: Network, topology: str, steps: int, seed: int) -> dict[str, float]:
    """Return what a round and a clock take, in virtual s, and how many ranks own blocks."""
    policy = form_policy(network, topology, tensors=[4 * size for size in _TENSORS])
    values = {f"w{place}": np.ones(size, np.float32) for place, size in enumerate(_TENSORS)}
    cluster = SimulatedCluster(network.size, network=network, policy=policy, seed=seed).join()

    def begin_round() -> list[Pending]:
        return [node.push(name, one.copy()) for node in cluster.nodes for name, one in values.items()]

    round_s = _seconds(cluster, begin_round, steps)
    cluster = SimulatedCluster(network.size, network=network, policy=policy, seed=seed).join()
    stores = [AsynchronousStore(node, cluster.timeline, seed=seed) for node in cluster.nodes]
    inits = [store.init(name, value) for store in stores for name, value in values.items()]
    cluster.run_until_ended(inits, _LIMIT_S)

    def begin_clock() -> list[Pending]:
        pushes = [store.push(name, one) for store in stores for name, one in values.items()]
        return pushes + [store.pull(name) for store in stores for name in values]

    clock_s = _seconds(cluster, begin_clock, steps)
    owners = sum(any(store.blocks[name].values for name in values) for store in stores)
    return {"round_s": round_s, "clock_s": clock_s, "owners": owners}


def _seconds(cluster: SimulatedCluster, begin: Callable[[], list[Pending]], steps: int) -> float:
    cluster.run_until_ended(begin(), _LIMIT_S)  # opens connections
    began = cluster.now
    for _ in range(steps):
        cluster.run_until_ended(begin(), _LIMIT_S)
    return (cluster.now - began) / steps


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=number, default=9, metavar="N")
    parser.add_argument(
        "--seeds", type=numbers, default=[51, 52, 53, 54, 55], metavar="N,…", help="of networks"
    )
    parser.add_argument("--rates-scale", type=factor, default=1.0, metavar="FACTOR", help="of all rates")
    parser.add_argument("--steps", type=number, default=5, metavar="N", help="rounds, and clocks")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
