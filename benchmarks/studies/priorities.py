"""What priorities gain (P3): the next forward pass begins while results of later layers are under way.

    python benchmarks/studies/priorities.py                                  # 9 sites of internet2.yaml
    python benchmarks/studies/priorities.py --size 16MB --layers 16 --json priorities.json
    python benchmarks/studies/priorities.py --torch                          # real processes, pair.yaml; root

On the simulated cluster. Each rank computes its backward pass layer by layer, from the last to the first, and
pushes each layer's gradients at once. A layer's forward pass begins when its sum is there. `first` sends the
first layers first, as MXNet's Trainer asks for; `none` gives all the same priority, so that layers go in the
order in which they were registered; `last` sends the layers in the order in which their gradients are there,
as a queue would; `wait` sends as `first` does, and begins the forward pass when all sums are there.

With --torch, real processes on an emulated network: DDP and ScheduledOptimizer take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, factor, number, seconds, writable
from netstorm.errors import NetStormError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import SimulatedNode
from netstorm.topology.files import load_network
from studies import torch_priorities

_NETWORKS = Path(__file__).parents[2] / "examples" / "networks"

_PRIORITIES: dict[str, Callable[[int], int]] = {
    "first": lambda layer: -layer,
    "none": lambda _: 0,
    "last": lambda layer: layer,
    "wait": lambda layer: -layer,
}


class Rank:
    """The program of one rank."""

    def __init__(self, cluster: SimulatedCluster, node: SimulatedNode, order: str, options: Any) -> None:
        self.cluster, self.node, self.order, self.options = cluster, node, order, options
        self.priority = _PRIORITIES[order]
        self.begun: list[float] = []
        self.early = 0
        """Forward passes that have begun before all sums were there."""
        self._pending: dict[int, Any] = {}
        self._gradient = np.ones(max(1, options.size // 4 // options.layers), np.float32)

    def begin(self) -> None:
        """Begin the next step."""
        self.begun.append(self.cluster.now)
        if len(self.begun) <= self.options.steps:
            self._forward(0)

    def _forward(self, layer: int) -> None:
        options, needed = self.options, [layer]
        if self.order == "wait":
            needed = list(range(options.layers))
        waits = [
            self._pending[one] for one in needed if one in self._pending and not self._pending[one].ended
        ]
        if waits:
            waits[0].then(partial(self._forward, layer))
            return
        if layer == 0:
            self.early += any(not one.ended for one in self._pending.values())
        then = partial(self._forward, layer + 1)
        if layer == options.layers - 1:
            then = partial(self._backward, layer)
        self._after(options.compute / 3 / options.layers, then)

    def _backward(self, layer: int) -> None:
        self._after(self.options.compute * 2 / 3 / self.options.layers, partial(self._push, layer))

    def _push(self, layer: int) -> None:
        name = f"layer{layer}"
        self._pending[layer] = self.node.push(name, self._gradient, priority=self.priority(layer))
        if layer:
            self._backward(layer - 1)
        else:
            self.begin()

    def _after(self, delay_s: float, action: Any) -> None:
        self.cluster.at(self.cluster.now + delay_s, action)


def measured(order: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a step takes, in s."""
    network = load_network(options.network).scaled(options.rates_scale)
    network = replace(network, changes=())
    cluster = SimulatedCluster(network.size, network=network, seed=1).join()
    for node in cluster.nodes:
        for layer in range(options.layers):
            elements = max(1, options.size // 4 // options.layers)
            node.register(f"layer{layer}", (elements,), "float32")
    ranks = [Rank(cluster, node, order, options) for node in cluster.nodes]
    for rank in ranks:
        rank.begin()
    cluster.run_until(lambda: all(len(rank.begun) > options.steps for rank in ranks), 1e5, "all steps")
    warm = options.steps // 4
    steps = [b - a for rank in ranks for a, b in zip(rank.begun[warm:], rank.begun[warm + 1 :], strict=False)]
    return {
        "order": order,
        "step_s": statistics.mean(steps),
        "compute_s": options.compute,
        "early_share": sum(rank.early for rank in ranks) / len(ranks) / (options.steps - 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all orders, and return the exit code."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    try:
        if options.torch:
            rows = torch_priorities.main(options)
        for order in () if options.torch else _PRIORITIES:
            rows.append(measured(order, options))
            row = rows[-1]
            print(
                f"{order}: a step takes {row['step_s']:.3f} s, {row['step_s'] - options.compute:.3f} s more "
                f"than its computation; {row['early_share']:.0%} of the forward passes begin before all sums "
                "are there",
                flush=True,
            )
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"error: the job has failed: {error}", file=sys.stderr)
        return 1
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": shown, "rows": rows}, indent=1, default=str) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="PyTorch, on an emulated network; needs root")
    parser.add_argument("--network", help="file (default: internet2.yaml; with --torch pair.yaml)")
    parser.add_argument("--rates-scale", type=factor, default=1.0, help="factor of all rates (default: 1)")
    parser.add_argument("--size", type=amount, default=8_000_000, help="of the model (default: 8MB)")
    parser.add_argument("--layers", type=number, default=8, help="of equal size (default: 8)")
    parser.add_argument("--compute", type=seconds, default=0.6, help="s a step, two thirds backward (.6)")
    parser.add_argument("--steps", type=number, default=12, help="of each rank (default: 12)")
    parser.add_argument("--turns", type=number, default=9, help="with --torch: of --steps steps (default: 9)")
    parser.add_argument("--chunk", type=number, help="with --torch: elements of a chunk (NetStorm's)")
    parser.add_argument("--timeout", type=seconds, default=600.0, help="s for --torch's job (default: 600)")
    parser.add_argument("--json", type=writable, help="file for the results")
    options = parser.parse_args(arguments)
    options.network = options.network or str(_NETWORKS / ("pair.yaml" if options.torch else "internet2.yaml"))
    return options


if __name__ == "__main__":
    sys.exit(main())
