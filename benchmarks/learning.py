"""How fast a job learns a network that nobody describes: nine nodes on the simulated cluster.

    python benchmarks/learning.py --json learning.json
    python benchmarks/learning.py --families mesh --seeds 3 --megabytes 4

For each network: what round 15 takes from no knowledge at all, beside a job that was told the true rates; how
many links have been measured after 30 rounds, with auxiliary paths and without (the paper's avalanche
effect: what no tree uses nobody measures, and what nobody measures no tree uses); and the part of all bytes
that reports of measurements were.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from harness.arguments import number, writable
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.frames import Buffer, open_frames
from netstorm.protocol.messages import Measured
from netstorm.topology.network import FAMILIES, Network, generate

LEARNT = 15
"""The round that is compared with those of a job that was told everything."""
SEEN = 30
"""The round after which measured links are counted."""
_LONGEST_ROUND_S = 1e5


class Bytes:
    """Counts what passes in a cluster, and what of it is reports of measurements."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.all = self.reports = 0
        self._before = cluster.network.watch
        cluster.network.watch = self._watch

    def _watch(self, source: str, target: str, header: bytes, payload: Buffer | None) -> None:
        if self._before is not None:
            self._before(source, target, header, payload)
        self.all += len(header) + (0 if payload is None else memoryview(payload).nbytes)
        if target == "scheduler" and isinstance(open_frames(header, 1).message, Measured):
            self.reports += len(header)


def rounds(cluster: SimulatedCluster, count: int, values: np.ndarray[Any, Any]) -> list[float]:
    """Return the virtual seconds of each of `count` more rounds."""
    times = []
    for _ in range(count):
        begin = cluster.now
        pending = [node.push("w", values, in_place=True) for node in cluster.nodes]
        cluster.run_until_ended(pending, _LONGEST_ROUND_S)
        times.append(max(one.ended_at or 0.0 for one in pending) - begin)
        for node in cluster.nodes:
            if not (node.pending[-1].result() == cluster.size).all():
                raise AssertionError(f"rank {node.rank}: a wrong sum")
            node.pending.clear()
    return times


def learn(network: Network, values: np.ndarray[Any, Any], **settings: Any) -> dict[str, Any]:
    """Return how a job that begins with nothing fares; `settings` as of `SimulatedCluster`."""
    cluster = SimulatedCluster(
        network.size, network=network, awareness=True, model=f"{values.nbytes}B", **settings
    )
    counted = Bytes(cluster)
    cluster.join()
    times = rounds(cluster, LEARNT, values)
    awareness = cluster.scheduler.machine.awareness
    assert awareness is not None
    links = {(link.source, link.target) for link in network.links}
    seen = [len(awareness.collector.measured & links)]
    for _ in range(SEEN - LEARNT):
        times += rounds(cluster, 1, values)
        seen.append(len(awareness.collector.measured & links))
    return {
        "round_s": times[LEARNT - 1],
        "times": [round(one, 4) for one in times],
        "seconds": round(cluster.now, 1),
        "links": len(links),
        "seen": seen[-1],
        "seen_at_15": seen[0],
        "policies": cluster.scheduler.machine.policy.version,
        "report_ratio": counted.reports / counted.all,
    }


def told(network: Network, values: np.ndarray[Any, Any], **settings: Any) -> float:
    """Return the seconds of a later round of a job that knows the true rates and keeps its first policy."""
    cluster = SimulatedCluster(network.size, network=network, model=f"{values.nbytes}B", **settings).join()
    return rounds(cluster, 4, values)[-1]


def study(family: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what comes of one network."""
    network = generate(family, options.nodes, seed)
    values = np.ones(int(options.megabytes * 250_000), np.float32)
    row: dict[str, Any] = {"family": family, "seed": seed}
    for name in options.ways:
        settings = {
            "seed": seed,
            "topology": options.topology,
            "num_roots": options.roots,
            "aux_path": name == "with",
        }
        found = learn(network, values, knows_links=options.knowledge == "links", **settings)
        found["told_s"] = told(network, values, **settings)
        found["ratio"] = found["round_s"] / found["told_s"]
        row[name] = found
    return row


def summary(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each family and way."""
    lines = []
    rows = list(rows)
    for family in dict.fromkeys(row["family"] for row in rows):
        for way in (one for one in ("with", "without") if one in rows[0]):
            found = [row[way] for row in rows if row["family"] == family]
            ratios = sorted(one["ratio"] for one in found)
            share = [one["seen"] / one["links"] for one in found]
            lines.append(
                f"{family:10s} {way:7s} auxiliary paths: round {LEARNT} "
                f"x{math.exp(statistics.fmean(map(math.log, ratios))):.3f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}), within 15 %: {sum(r <= 1.15 for r in ratios)} of "
                f"{len(ratios)}; links seen {statistics.fmean(share):.1%} (least {min(share):.1%}); reports "
                f"{max(one['report_ratio'] for one in found):.4%} of bytes"
            )
    return lines


def main() -> None:
    """Run what was asked for, print it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", type=lambda text: text.split(","), default=sorted(FAMILIES))
    parser.add_argument("--seeds", type=number, default=10, help="networks of each family")
    parser.add_argument("--nodes", type=number, default=9)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of a round")
    parser.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        default=["with", "without"],
        help="with auxiliary paths, without, or both",
    )
    parser.add_argument(
        "--knowledge",
        choices=("links", "nothing"),
        default="links",
        help="what the scheduler is told: which pairs of nodes are joined, or not even that; default links",
    )
    parser.add_argument("--topology", default="auto")
    parser.add_argument("--roots", type=int, default=0, help="of fapt; 0: all nodes")
    parser.add_argument("--json", type=writable, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for family in options.families:
        for seed in range(1, options.seeds + 1):
            row = study(family, seed, options)
            rows.append(row)
            print(
                f"{family:10s} seed {seed:2d}: "
                + "; ".join(
                    f"{way}: round {LEARNT} {row[way]['round_s']:.3f} s, told {row[way]['told_s']:.3f} s, "
                    f"x{row[way]['ratio']:.2f}, {row[way]['seen']} of {row[way]['links']} links seen"
                    for way in options.ways
                ),
                flush=True,
            )
    for line in summary(rows):
        print(line)
    if options.json is not None:
        settings = {"nodes": options.nodes, "megabytes": options.megabytes, "topology": options.topology}
        options.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
