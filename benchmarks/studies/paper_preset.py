#!/usr/bin/env python3
"""Why the paper's std and pro are slower than its lite where nothing changes, simulated from a seed.

python benchmarks/studies/paper_preset.py --json paper-preset.json

Rounds of NETSTORM_PRESET=paper on a static network, real nodes on virtual time with ideal TCP, given a file
of the network as those of `netstorm bench wan` are: as the paper has it, then with one part of it changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from changing import Teller
from harness.arguments import amount, factor, number
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.files import dump_network, load_network
from netstorm.topology.network import Network

_NETWORK: Final = Path(__file__).parents[2] / "examples" / "networks" / "internet2.yaml"
_LIMIT_S: Final = 3600.0
_TOLD: Final = "the scheduler is told the true rates"
_LITE: Final = {"awareness": False, "aux_path": False}
_STD: Final = {"awareness": True, "aux_path": False}
_PRO: Final = {"awareness": True, "aux_path": True}
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "lite": _LITE,
    "lite, chunks of a sixteenth": {**_LITE, "chunk_size": 62_500},
    "std": _STD,
    f"std, {_TOLD}": _STD,
    "std, roots are chosen anew": {**_STD, "freeze_roots": False},
    f"std, roots are chosen anew, {_TOLD}": {**_STD, "freeze_roots": False},
    "std, our estimator": {**_STD, "estimator": "tcp"},
    "std, policies change by our rule": {**_STD, "update_rate": 0.1},
    "pro": _PRO,
    f"pro, {_TOLD}": _PRO,
    "pro, no chunk relieves": {**_PRO, "aux_rule": "arrival"},
    "pro, our search of paths": {**_PRO, "aux_search": "spare"},
    "auxiliary paths without awareness": {"awareness": False, "aux_path": True},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all variants, print a table, and return the exit code."""
    options = _options(arguments)
    network = replace(load_network(str(_NETWORK)).scaled(options.rates_scale), changes=())
    rows: list[dict[str, Any]] = []
    for name in VARIANTS:
        row = rounds(network, name, options.size, options.rounds, options.seed)
        rows.append({"what": name, **row})
        print(
            f"{name:60} {row['mean_s']:6.2f} s (median {row['median_s']:.2f}, {row['least_s']:.2f} to "
            f"{row['most_s']:.2f}), {row['policies']} policies, {row['detoured']} chunks on other paths",
            flush=True,
        )
    if options.json:
        content = {"options": {**vars(options), "json": None}, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def rounds(network: Network, variant: str, size: int, count: int, seed: int) -> dict[str, float]:
    """Return what rounds of a variant take in virtual s, after the first, and what changed meanwhile."""
    settings = {"preset": "paper", **VARIANTS[variant]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_network(network))
        file.flush()
        cluster = SimulatedCluster(
            network.size, network=network, seed=seed, network_file=file.name, **settings
        ).join()
    if variant.endswith(_TOLD):
        Teller(cluster, network, 0.0)
    values, times = np.ones(size // 4, np.float32), []
    for _ in range(1 + count):
        began = cluster.now
        pending = [node.push("w", values, in_place=True) for node in cluster.nodes]
        cluster.run_until_ended(pending, _LIMIT_S)
        times.append(cluster.now - began)
        for node in cluster.nodes:
            node.pending.clear()
    counters = [node.machine.counters.snapshot() for node in cluster.nodes]
    return {
        "mean_s": statistics.fmean(times[1:]),
        "median_s": statistics.median(times[1:]),
        "least_s": min(times[1:]),
        "most_s": max(times[1:]),
        "policies": cluster.scheduler.machine.policy.version,
        "detoured": sum(int(found.get("detoured", 0)) for found in counters),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rates-scale", type=factor, default=0.5, metavar="FACTOR")
    parser.add_argument("--size", type=amount, default=16_000_000)
    parser.add_argument("--rounds", type=number, default=8, metavar="N", help="that count")
    parser.add_argument("--seed", type=number, default=1)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
