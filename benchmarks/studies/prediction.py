"""How well `predict` agrees with the simulated cluster: real nodes and scheduler on virtual time.

    python benchmarks/studies/prediction.py --json prediction.json

Random cases of 2 to 9 nodes, in meshes, sparse networks whose pairs share links, and behind access caps, with
tensors of 4 to 20 MB. Prints each case, and how (predicted - simulated) / simulated is distributed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from netstorm.lab.simulation.experiment import Experiment, in_cluster
from netstorm.topology.network import FAMILIES, Network, generate
from netstorm.topology.packing import packing
from netstorm.topology.policy import Forest
from netstorm.topology.prediction import predict
from netstorm.topology.resources import with_look_ahead
from netstorm.topology.schemes import fapt, star

SCHEMES = ("star", "one fapt", "fapt", "packing")
CHUNKS = (256 * 1024, 512 * 1024, 1_000_000)


def forest(scheme: str, network: Network, tensor_bytes: int, chunk_bytes: int) -> Forest:
    """Return the trees of a scheme."""
    if scheme == "star":
        return star(network)
    if scheme == "packing":
        found = packing(network, tensor_bytes=tensor_bytes, chunk_bytes=chunk_bytes)
        return with_look_ahead(network, found, chunk_bytes)
    return fapt(network, 1 if scheme == "one fapt" else 0, chunk_bytes=chunk_bytes)


def case(seed: int) -> dict[str, Any]:
    """Draw one case, predict it and simulate it."""
    draw = random.Random(seed)
    family = sorted(FAMILIES)[seed % len(FAMILIES)]
    nodes = draw.randint(2, 9)
    total = draw.randint(1_000_000, 5_000_000) * 4
    chunk_bytes = draw.choice(CHUNKS)
    scheme = draw.choice(SCHEMES)
    cut = draw.randrange(total // 8) * 4
    tensors = (cut, total - cut) if draw.random() < 0.5 and cut else (total,)
    network = generate(family, nodes, seed)
    policy = forest(scheme, network, total, chunk_bytes).policy(0)
    predicted = predict(network, policy, tensors, chunk_bytes=chunk_bytes).seconds
    (simulated,) = in_cluster(
        network, policy, Experiment(tensors=tensors, chunk_bytes=chunk_bytes, seed=seed)
    )
    return {
        "seed": seed,
        "family": family,
        "nodes": nodes,
        "scheme": scheme,
        "tensors": tensors,
        "chunk_bytes": chunk_bytes,
        "predicted_s": round(predicted, 6),
        "simulated_s": round(simulated, 6),
        "error": round(predicted / simulated - 1, 6),
    }


def main() -> None:
    """Run the cases, print what came out."""
    parser = argparse.ArgumentParser(description="compares predictions with the simulated cluster")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all of it")
    arguments = parser.parse_args()
    cases = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        found = case(seed)
        cases.append(found)
        print(
            f"{found['seed']:4d} {found['family']:10s} {found['nodes']} nodes  {found['scheme']:8s} "
            f"{sum(found['tensors']) / 1e6:5.1f} MB in {found['chunk_bytes'] / 1e6:.2f} MB  predicted "
            f"{found['predicted_s']:8.3f} s  simulated {found['simulated_s']:8.3f} s  {found['error']:+.1%}",
            flush=True,
        )
    errors = sorted(found["error"] for found in cases)
    summary = {
        "cases": len(errors),
        "within 10 %": sum(abs(error) <= 0.1 for error in errors),
        "least": errors[0],
        "median": statistics.median(errors),
        "most": errors[-1],
        "mean absolute": round(statistics.fmean(map(abs, errors)), 6),
    }
    print(json.dumps(summary))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"summary": summary, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
