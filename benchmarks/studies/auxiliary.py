"""What auxiliary paths gain, and whether they ever cost anything, on static networks of nine nodes.

    python benchmarks/studies/auxiliary.py --json auxiliary.json
    python benchmarks/studies/auxiliary.py --grid --json grid.json

Real nodes and the real scheduler on virtual time over a virtual network: each scheme with and without
detours, by the rule of earliest arrival and by the paper's rule of queues. `--grid` varies the two bounds of
the latter (the paper's Fig. 17). The policies' detours lead over what the trees leave unused; `--everywhere`
offers every detour of every hop instead, as the paper's Algorithm 3 would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.arguments import amount, number, writable
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.detours import detours
from netstorm.topology.files import load_network
from netstorm.topology.form import form_policy
from netstorm.topology.network import FAMILIES, Network, generate
from netstorm.topology.policy import Detour, Policy

NODES = 9
SCHEMES = {"star": {}, "one fapt": {"num_roots": 1}, "mst": {}, "fapt": {}, "packing": {}}
SCHEME_NAMES = {"one fapt": "fapt"}
BUSY_BOUNDS = (1, 2, 3, 4, 5)
QUEUE_LENGTHS = (1, 2, 3, 4, 5)


def networks(seed: int) -> Iterator[tuple[str, Network]]:
    """Yield five networks, which don't change."""
    for family in sorted(FAMILIES):
        yield family, generate(family, NODES, seed)
    path = Path(__file__).parents[2] / "examples" / "networks" / "internet2.yaml"
    yield "internet2.yaml", replace(load_network(str(path)), changes=())


def policy_of(network: Network, scheme: str, nbytes: int, chunk_bytes: int, *, everywhere: bool) -> Policy:
    """Return a scheme's policy, with detours."""
    policy = form_policy(
        network,
        SCHEME_NAMES.get(scheme, scheme),
        tensors=(nbytes,),
        chunk_bytes=chunk_bytes,
        auxiliary=not everywhere,
        **SCHEMES[scheme],
    )
    if not everywhere:
        return policy
    found = detours(network, policy.trees, chunk_bytes=chunk_bytes)
    return msgspec.structs.replace(
        policy,
        detours=tuple(
            Detour(
                path=tuple(path),
                links=tuple(
                    (network.throughput(*ends), network.link(*ends).latency)
                    for ends in itertools.pairwise(path)
                ),
            )
            for paths in found.values()
            for path in paths
            if len(path) > 2
        ),
    )


def rounds(
    network: Network, policy: Policy, nbytes: int, chunk_bytes: int, count: int, **settings: Any
) -> tuple[float, int]:
    """Return the median seconds of some rounds after the first, and how many chunks of them were detoured."""
    cluster = SimulatedCluster(
        network.size,
        network=network,
        policy=policy,
        chunk_size=chunk_bytes // 4,
        largest_chunk=chunk_bytes // 4,
        **settings,
    ).join()
    ones = np.ones(nbytes // 4, np.float32)
    times = []
    before = 0
    for place in range(1 + count):
        begin = cluster.now
        pending = [node.push("tensor", ones, in_place=True) for node in cluster.nodes]
        cluster.run_until_ended(pending, 1e6)
        times.append(max(one.ended_at or 0.0 for one in pending) - begin)
        for one in pending:
            if not (one.result() == network.size).all():
                raise AssertionError(f"{one.what}: a wrong sum")
            one.value = None
        for node in cluster.nodes:
            node.pending.clear()
        if place == 0:
            before = _detoured(cluster)
    return statistics.median(times[1:]), (_detoured(cluster) - before) // count


def _detoured(cluster: SimulatedCluster) -> int:
    return sum(int(node.machine.counters.snapshot().get("detoured", 0)) for node in cluster.nodes)


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every scheme on every network, without detours and with, by both rules."""
    rows = []
    for (name, network), scheme in itertools.product(networks(options.seed), options.schemes):
        policy = policy_of(network, scheme, options.size, options.chunk, everywhere=options.everywhere)
        plain = msgspec.structs.replace(policy, detours=())
        without_s, _ = rounds(network, plain, options.size, options.chunk, options.rounds)
        row: dict[str, Any] = {
            "network": name,
            "scheme": scheme,
            "detours": len(policy.detours),
            "without_s": round(without_s, 6),
        }
        for rule in ("arrival", "queue"):
            with_s, detoured = without_s, 0
            if policy.detours:
                with_s, detoured = rounds(
                    network,
                    policy,
                    options.size,
                    options.chunk,
                    options.rounds,
                    aux_rule=rule,
                    primary_busy_bound=options.bounds[0],
                    auxiliary_queue_length=options.bounds[1],
                )
            row[rule] = {"seconds": round(with_s, 6), "gain": round(without_s / with_s - 1, 4)}
            row[rule]["chunks_detoured"] = detoured
        rows.append(row)
        print(
            f"{name:14s} {scheme:9s} {len(policy.detours):3d} detours  without {without_s:8.3f} s  "
            + "  ".join(
                f"{rule} {row[rule]['gain']:+7.1%} ({row[rule]['chunks_detoured']} chunks)"
                for rule in ("arrival", "queue")
            ),
            flush=True,
        )
    return rows


def grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Vary the bounds of the queue rule; return the mean gain over the networks for each pair of them."""
    cases = []
    for (_, network), scheme in itertools.product(networks(options.seed), options.schemes):
        policy = policy_of(network, scheme, options.size, options.chunk, everywhere=options.everywhere)
        plain = msgspec.structs.replace(policy, detours=())
        without_s, _ = rounds(network, plain, options.size, options.chunk, options.rounds)
        cases.append((network, policy, without_s))
    rows = []
    for length in QUEUE_LENGTHS:
        gains = []
        for bound in BUSY_BOUNDS:
            found = []
            for network, policy, without_s in cases:
                with_s, _ = rounds(
                    network,
                    policy,
                    options.size,
                    options.chunk,
                    options.rounds,
                    aux_rule="queue",
                    primary_busy_bound=bound,
                    auxiliary_queue_length=length,
                )
                found.append(without_s / with_s - 1)
            gains.append(statistics.fmean(found))
            rows.append(
                {
                    "primary_busy_bound": bound,
                    "auxiliary_queue_length": length,
                    "mean_gain": round(gains[-1], 4),
                    "gains": [round(gain, 4) for gain in found],
                }
            )
        print(f"queue length {length}: " + "  ".join(f"{gain:+6.1%}" for gain in gains), flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the grid (needs matplotlib): the mean gain by the two bounds, and below it the least."""
    from matplotlib import rc_context  # noqa: PLC0415 - not everybody has it
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context({"svg.hashsalt": "netstorm", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5.2, 3.8), layout="constrained")
        axes = figure.subplots()
        gains = np.array([row["mean_gain"] for row in rows]).reshape(len(QUEUE_LENGTHS), len(BUSY_BOUNDS))
        shades = axes.imshow(100 * gains, origin="lower", cmap="Blues", vmin=0.0, vmax=10.0)
        for place, row in enumerate(rows):
            y, x = divmod(place, len(BUSY_BOUNDS))
            text = f"{row['mean_gain']:+.1%}\n({min(row['gains']):+.0%})"
            axes.text(x, y, text, ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(BUSY_BOUNDS)), map(str, BUSY_BOUNDS))
        axes.set_yticks(range(len(QUEUE_LENGTHS)), map(str, QUEUE_LENGTHS))
        axes.set_xlabel("PRIMARY_BUSY_BOUND")
        axes.set_ylabel("AUXILIARY_QUEUE_LENGTH")
        figure.colorbar(shades, label="faster than without, mean (worst case), %")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run what was asked for, print it, write it."""
    parser = argparse.ArgumentParser(description="what auxiliary paths gain on static networks")
    parser.add_argument("--grid", action="store_true", help="vary the bounds of the queue rule")
    parser.add_argument("--everywhere", action="store_true", help="offer all detours of all hops")
    parser.add_argument(
        "--bounds",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(2, 1),
        metavar="BUSY,LENGTH",
        help="of the queue rule: PRIMARY_BUSY_BOUND,AUXILIARY_QUEUE_LENGTH; default 2,1",
    )
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=list(SCHEMES))
    parser.add_argument("--size", type=amount, default=20_000_000, help="of the tensor, such as 20MB")
    parser.add_argument("--chunk", type=amount, default=262_144)
    parser.add_argument("--rounds", type=number, default=3)
    parser.add_argument("--seed", type=number, default=1, help="of the networks")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="with --grid: a picture of it")
    parser.add_argument("--json", type=writable, metavar="FILE")
    options = parser.parse_args()
    rows = grid(options) if options.grid else compare(options)
    if options.grid and options.plot is not None:
        draw(rows, options.plot)
    if options.json is not None:
        settings = {
            "nodes": NODES,
            "bytes": options.size,
            "chunk_bytes": options.chunk,
            "rounds": options.rounds,
            "seed": options.seed,
            "bounds": options.bounds,
            "everywhere": options.everywhere,
        }
        options.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
