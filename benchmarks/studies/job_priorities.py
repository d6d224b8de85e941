#!/usr/bin/env python3
"""What priorities between jobs gain (MLNET, Fig. 3): several jobs on the same hosts, simulated.

python benchmarks/studies/job_priorities.py --jobs 6 --seeds 10,11,12 --json priorities.json

All jobs begin together, have sizes that the seed draws, and end after some rounds. The time until a job's end
is its makespan. Under "priorities" each job has a number of its own, drawn at random as in the paper, or the
larger the fewer bytes it sends ("smallest first"). "star" has servers' traffic, the others trees.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, number, numbers
from netstorm.lab.simulation.cluster import SimulatedJobs
from netstorm.topology.network import FAMILIES, Network, generate

_LIMIT_S: Final = 3600.0
"""Virtual time in which all jobs end, or the study fails."""
_COMPARED: Final = (
    ("star, fair", "star", "fair"),
    ("star, priorities", "star", "random"),
    ("trees, fair", "auto", "fair"),
    ("trees, priorities", "auto", "random"),
    ("trees, smallest first", "auto", "smallest first"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print a table, and return the exit code."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        network = generate(options.family, options.nodes, seed)
        draw = random.Random(seed)
        sizes = [int(draw.uniform(0.25, 1.0) * options.most / 4) for _ in range(options.jobs)]
        places = draw.sample(range(1, options.jobs + 1), options.jobs)
        for name, topology, rule in _COMPARED:
            by_size = sorted(range(options.jobs), key=sizes.__getitem__, reverse=True)
            priorities = {
                "fair": [0] * options.jobs,
                "random": places,
                "smallest first": [1 + by_size.index(job) for job in range(options.jobs)],
            }[rule]
            spans = makespans(network, sizes, priorities, topology=topology, rounds=options.rounds, seed=seed)
            rows.append({"seed": seed, "case": name, "makespans_s": spans})
            print(
                f"seed {seed}: {name}: median {statistics.median(spans):.2f} s", file=sys.stderr, flush=True
            )
    print(_table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": rows}, indent=1) + "\n")
    return 0


def makespans(
    network: Network,
    sizes: Sequence[int],
    priorities: Sequence[int],
    *,
    topology: str,
    rounds: int,
    seed: int,
) -> list[float]:
    """Return how long each job takes, in virtual s, if all begin together.

    Args:
        network: that all jobs share: rank r of each is at node r.
        sizes: float32 elements that a job's round sums, by job.
        priorities: by job; 0: none.
        topology: of all jobs.
        rounds: of each job.
        seed: of everything random.
    """
    names = [f"job{number}" for number in range(len(sizes))]
    hosts = {SimulatedJobs.host_of(name, rank): rank for name in names for rank in network.ranks}
    jobs = SimulatedJobs(seed=seed, network=network, hosts=hosts, topology=topology)
    nodes = [
        jobs.start(name, network.size, job_priority=priority)
        for name, priority in zip(names, priorities, strict=True)
    ]
    jobs.run_until_ended([node.joined for of_job in nodes for node in of_job])
    began, ends = jobs.now, [0.0] * len(sizes)

    def go(job: int, rank: int, left: int) -> None:
        if not left:
            ends[job] = max(ends[job], jobs.now - began)
            done.add((job, rank))
            return
        one = nodes[job][rank].push("w", np.ones(sizes[job], np.float32), in_place=True)
        one.then(lambda: go(job, rank, left - 1))

    done: set[tuple[int, int]] = set()
    for job in range(len(sizes)):
        for rank in network.ranks:
            go(job, rank, rounds)
    jobs.run_until(lambda: len(done) == len(sizes) * network.size, _LIMIT_S, "the end of all jobs")
    return ends


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians and the longest makespan of each case over those of "star, fair", over all seeds."""
    by_case: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["seed"]] = row["makespans_s"]
    base = by_case[_COMPARED[0][0]]
    lines = ["case                     median   longest   (over star, fair: mean of seeds, range of medians)"]
    for case, of_seed in by_case.items():
        medians = [
            statistics.median(spans) / statistics.median(base[seed]) for seed, spans in of_seed.items()
        ]
        longest = [max(spans) / max(base[seed]) for seed, spans in of_seed.items()]
        lines.append(
            f"{case:24} {statistics.fmean(medians):6.2f}   {statistics.fmean(longest):7.2f}   "
            f"{min(medians):.2f} to {max(medians):.2f}"
        )
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=number, default=6, metavar="N")
    parser.add_argument("--nodes", type=number, default=5, metavar="N")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="internet2")
    parser.add_argument(
        "--seeds", type=numbers, default=[10], metavar="N,…", help="of networks, sizes and priorities"
    )
    parser.add_argument("--rounds", type=number, default=6, metavar="N", help="of each job")
    parser.add_argument(
        "--most", type=amount, default=4_000_000, metavar="SIZE", help="of a round of the largest job"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
