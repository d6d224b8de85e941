"""How long steps take on lossy links whose rates dip, with bounded loss and without.

    python benchmarks/studies/bounded_loss.py                          # simulated, on virtual time
    python benchmarks/studies/bounded_loss.py --emulated               # real processes in network namespaces
    python benchmarks/studies/bounded_loss.py --dips both              # links to the sites dip, too
    python benchmarks/studies/bounded_loss.py --bounds 0,0.1,0.2 --dgt 0.8 --json bounded-loss.json
    python benchmarks/studies/bounded_loss.py --unused                 # its cost if rounds wait for all

Sites around a hub: each site's link to the hub dips to a tenth of its rate for some time, at random times
of its own. All modes see the same dips, one after the other. Every rank computes, pushes, waits for the
sums, and begins anew. A step's time is from one begin to the next, at each rank. What is late is kept and
added to the next step.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, factor, number, seconds, writable
from netstorm.errors import NetStormError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.frames import ranks_in
from netstorm.protocol.messages import LossTerms
from netstorm.topology.files import dump_network, load_network
from netstorm.topology.network import Change, Link, Network, Rank, Routing

WARM_S = 10.0
"""Before anything is counted: connections, and what is learnt of the network."""

_WEIGHTS = (1.0, 0.1)
"""Sizes of the chunks' values, by turns: what DGT can rank."""


def bursty_network(options: argparse.Namespace, begin: float, until: float) -> Network:
    """Return the network, with loss on all links, and the dips of each."""
    if options.network:
        network = load_network(options.network).scaled(options.rates_scale)
        links = tuple(replace(link, loss=options.loss) for link in network.links)
    else:
        network = Network.uniform(options.sites + 1)
        numbers = {"rate": options.rate, "latency": options.latency, "loss": options.loss}
        ends = [(site, 0) for site in range(1, options.sites + 1)]
        ends += [(hub, site) for site, hub in ends]
        links = tuple(Link(source=Rank(a), target=Rank(b), **numbers) for a, b in ends)
    changes = []
    for link in links:
        if options.dips == "up" and link.source == 0:
            continue
        chance = random.Random(f"{options.seed} {link.source} {link.target}")
        at = begin + chance.expovariate(1 / options.dip_every)
        while at < until:
            dip_s = options.dip * chance.uniform(0.5, 1.5)
            change = partial(Change, source=link.source, target=link.target)
            changes.append(change(at=round(at, 3), rate=round(link.rate * options.dip_rate)))
            changes.append(change(at=round(at + dip_s, 3), rate=link.rate))
            at += dip_s + chance.expovariate(1 / options.dip_every)
    return replace(
        network,
        links=links,
        routing=Routing.OVERLAY,
        changes=tuple(sorted(changes, key=lambda one: one.at)),
    )


def emulated(options: argparse.Namespace, terms: LossTerms | None) -> dict[str, Any]:
    """Train on an emulated network; return what steps took."""
    network = bursty_network(options, options.seconds / 10, options.seconds + 60)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "network.yaml")
        file.write_text(dump_network(network))
        command = [sys.executable, "-m", "netstorm", "launch", "--wan", str(file)]
        command += ["--env", f"CHUNK_SIZE={options.chunk}"]
        if not options.network:
            command += ["--env", "NETSTORM_TOPOLOGY=star", "--env", "NETSTORM_HUB=0"]
        if terms:
            command += ["--env", f"NETSTORM_LOSS_BOUND={terms.bound}"]
            command += ["--env", f"NETSTORM_DEADLINE={terms.deadline_s}"]
        if terms and terms.important:
            command += ["--env", "ENABLE_DGT=1", "--env", f"DMLC_K={terms.important}"]
        worker = Path(__file__).parents[1] / "workers" / "late_gradients.py"
        numbers = [options.size, options.keys, options.compute, options.seconds]
        command += ["--", sys.executable, str(worker), *map(str, numbers), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        answers = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("rank*.json"))]
    counters: Counter[str] = Counter()
    for answer in answers:
        counters.update({name: int(count) for name, count in answer["counters"].items() if count < math.inf})
    steps, total = answers[0]["steps"], answers[0]["sum"]
    late = 1 - total / (steps * network.size)
    return summary(terms, np.concatenate([answer["times"] for answer in answers]), late, counters)


def summary(terms: LossTerms | None, times: Any, late: float, counters: Counter[str]) -> dict[str, Any]:
    """Return what steps took, in s, and what came too late."""
    times = np.sort(times)
    return {
        "bound": terms.bound if terms else 0.0,
        "deadline_s": terms.deadline_s if terms else None,
        "important": terms.important if terms else 0.0,
        "steps": len(times),
        "mean_s": float(times.mean()),
        **{f"p{p}_s": float(np.percentile(times, p)) for p in (50, 90, 95, 99)},
        "max_s": float(times[-1]),
        "late_share": late,
        **{name: counters[name] for name in ("chunks_ended_early", "sums_passed_on", "chunks_moved")},
    }


class Training:
    """The programs of all ranks of one job."""

    def __init__(self, options: argparse.Namespace, terms: LossTerms | None) -> None:
        until = WARM_S + options.seconds
        self.network = bursty_network(options, WARM_S, until)
        self.cluster = SimulatedCluster(
            self.network.size,
            network=self.network,
            seed=options.seed,
            tcp="reno" if options.reno else "ideal",
            awareness=not options.static,
            chunk_size=options.chunk,
            topology="fapt" if options.network else "star",
            hub=0,
            loss_bound=terms.bound if terms else 0.0,
        ).join()
        self.terms, self.options, self.until = terms, options, until
        self.elements = max(1, options.size // 4 // options.keys)
        self.kept = {
            (rank, key): np.zeros(self.elements, np.float32)
            for rank in range(self.network.size)
            for key in range(options.keys)
        }
        self.gradient = np.ones(self.elements, np.float32)
        for place in range(0, self.elements, 32_768):
            self.gradient[place : place + 32_768] = _WEIGHTS[place // 32_768 % len(_WEIGHTS)]
        self.times: dict[int, list[float]] = {rank: [] for rank in range(self.network.size)}
        self.steps: Counter[int] = Counter()
        self.counted = self.given = 0.0

    def run(self) -> dict[str, Any]:
        """Train until the time is over; return what steps took."""
        for node in self.cluster.nodes:
            for key in range(self.options.keys):
                node.register(f"layer{key}", (self.elements,), "float32")
            self._compute(node.rank, self.cluster.now)
        while self.cluster.now < self.until:
            self.cluster.run_for(min(1.0, self.until - self.cluster.now))
            for node in self.cluster.nodes:  # what has ended is of no use
                node.operations.clear()
                node.pending.clear()
        counters: Counter[str] = Counter()
        for node in self.cluster.nodes:
            counters.update(node.machine.counters.snapshot())
        late = 1 - self.counted / self.given if self.given else 0.0
        return summary(self.terms, np.concatenate(list(self.times.values())), late, counters)

    def _compute(self, rank: int, begun: float) -> None:
        self.cluster.at(self.cluster.now + self.options.compute, partial(self._push, rank, begun))

    def _push(self, rank: int, begun: float) -> None:
        node, left = self.cluster.nodes[rank], self.options.keys

        def ended(pending: Any, operation: Any) -> None:
            nonlocal left
            pending.result()
            left -= 1
            bounds = operation.key.layout_of(operation.form).bounds
            for bits, chunks in operation.contributors.items():
                for chunk in ranks_in(chunks):
                    start, end = bounds[chunk]
                    self.given += end - start
                    self.counted += (end - start) * (bits >> rank & 1)
            if not left:
                if begun >= WARM_S:
                    self.times[rank].append(self.cluster.now - begun)
                self._compute(rank, self.cluster.now)

        for key in range(self.options.keys):
            kept = self.kept[rank, key]
            kept += self.gradient
            values = kept if self.terms else self.gradient
            pending = node.push(f"layer{key}", values, priority=-key, loss=self.terms)
            pending.then(partial(ended, pending, node.operations[-1]))


def unused() -> None:
    """Show what share of a simulated job's calls and time is that of rounds' ends without contributions, in
    rounds that wait for all.
    """
    cluster = SimulatedCluster(4, chunk_size=8192).join()
    values = [np.ones(64 * 8192, np.float32)] * 4
    cluster.allreduce("w", values)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(5):
        cluster.allreduce("w", values)
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ours = [row for (file, _, _), row in stats.items() if "rounds/bounded_loss/" in file]
    calls, all_calls = (sum(row[1] for row in rows) for rows in (ours, stats.values()))
    times, all_times = (sum(row[2] for row in rows) for rows in (ours, stats.values()))
    chunks = 5 * 64 * 4
    print(
        f"of {all_calls / chunks:.0f} calls for each chunk at each node, {calls / chunks:.1f} are of bounded "
        f"loss: {times / all_times:.2%} of the time under a profiler"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all modes, and return the exit code."""
    options = _options(arguments)
    if options.unused:
        unused()
        return 0
    try:
        rows = []
        for bound in options.bounds:
            deadline_s = options.deadline
            terms = LossTerms(bound=bound, deadline_s=deadline_s, important=options.dgt) if bound else None
            rows.append(emulated(options, terms) if options.emulated else Training(options, terms).run())
            if not deadline_s:
                options.deadline = round(1.3 * (rows[0]["p50_s"] - options.compute), 3)
            _show(rows[-1], rows[0])
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name not in ("json", "unused")}
        options.json.write_text(json.dumps({"options": shown, "rows": rows}, indent=1, default=str) + "\n")
    return 0


def _show(row: dict[str, Any], reliable: dict[str, Any]) -> None:
    gain = reliable["p99_s"] / row["p99_s"] if row["p99_s"] else math.nan
    print(
        f"bound {row['bound']:.2f}: mean {row['mean_s']:.3f} s, p50 {row['p50_s']:.3f}, "
        f"p95 {row['p95_s']:.3f}, p99 {row['p99_s']:.3f} ({gain:.2f} times), max {row['max_s']:.3f}; "
        f"{row['steps']} steps, {row['late_share']:.2%} of the gradients late",
        flush=True,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="real processes; needs root")
    parser.add_argument("--unused", action="store_true", help="the cost for rounds that wait for all")
    parser.add_argument(
        "--sites", type=number, default=6, help="around the hub, which is one more (default: 6)"
    )
    parser.add_argument("--rate", type=factor, default=20e6, help="of links, in bit/s (default: 20e6)")
    parser.add_argument("--latency", type=seconds, default=0.005, help="of links, in s (default: .005)")
    parser.add_argument("--network", help="network file, instead of sites around a hub")
    parser.add_argument("--rates-scale", type=factor, default=1.0, help="factor of its rates (default: 1)")
    parser.add_argument("--dips", choices=("up", "both"), default="up", help="links that dip (default: up)")
    parser.add_argument("--loss", type=float, default=0.01, help="of packets, on all links (default: .01)")
    parser.add_argument("--reno", action="store_true", help="loss limits connections as it does TCP Reno's")
    parser.add_argument("--static", action="store_true", help="no awareness: the first policy stays")
    parser.add_argument("--size", type=amount, default=1_000_000, help="of the model (default: 1MB)")
    parser.add_argument("--keys", type=number, default=4, help="tensors of the model (default: 4)")
    parser.add_argument("--chunk", type=number, default=8192, help="elements of a chunk (default: 8192)")
    parser.add_argument("--compute", type=seconds, default=0.1, help="s a step (default: .1)")
    parser.add_argument("--seconds", type=seconds, default=300.0, help="virtual time (default: 300)")
    parser.add_argument(
        "--dip-every", type=seconds, default=60.0, help="s between a link's dips (default: 60)"
    )
    parser.add_argument("--dip", type=seconds, default=2.0, help="s that a dip lasts, about (default: 2)")
    parser.add_argument("--dip-rate", type=float, default=0.1, help="factor of the rate (default: .1)")
    parser.add_argument("--bounds", type=_bounds, default=(0.0, 0.2), help="loss bounds (default: 0,0.2)")
    parser.add_argument("--deadline", type=seconds, help="s; default: 1.3 times the median communication")
    parser.add_argument("--dgt", type=float, default=0.0, help="share of chunks that must count (default: 0)")
    parser.add_argument("--seed", type=number, default=1, help="of dips and identities (default: 1)")
    parser.add_argument("--json", type=writable, help="file for the results")
    options = parser.parse_args(arguments)
    options.deadline = options.deadline or 0.0
    return options


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
