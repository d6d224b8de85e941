"""What part of the possible a job reaches on a changing network, on the simulated cluster.

    python benchmarks/changing.py --rates-scale .25 --times-scale 1/9 --sizes 16MB,64MB --json changing.json
    python benchmarks/changing.py --dips .25               # as bbr has them: PROBE_RTT, once in 10 s
    python benchmarks/changing.py --told .5                # somebody tells the scheduler the true rates
    python benchmarks/changing.py --drawn 10..14 --sizes 64MB    # on networks that seeds draw

The same job as `netstorm bench wan --dynamic --systems netstorm-std`, without TCP, processors, and noise:
what is missing here is for the decisions to gain, what is missing there beyond it is TCP's.

Each change also has the time until the first good policy: one that is predicted, for the true rates, to take
at most a tenth longer than the one that is formed for them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.arguments import amounts, factor, megabytes, number, seconds, seeds, writable
from netstorm.errors import NetStormError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.scheduler.awareness import Collector
from netstorm.topology.files import load_network
from netstorm.topology.form import form_with_options
from netstorm.topology.network import Change, Network, Routing, generate
from netstorm.topology.policy import Options, Policy
from netstorm.topology.searched_schemes import expected_policy
from race.course import Course, end_of_changes, networks_by_time, with_times_scaled

WARM_S = 20.0
"""Before the changes begin to count: connections, and what is learnt of the first network."""
DIP_EVERY_S = 10.0
DIP_RATE = 0.77e6
"""Bit/s: four segments in a round trip of 60 ms, what bbr sends while it looks for the shortest one."""
_DRAWN_EVERY_S = 20.0
_DRAWN_CHANGES = 3
_LONGEST_ROUND_S = 1e5
_GOOD = 1.1
"""A policy is good that takes at most so many times as long as the best one."""
_SOON_S = 2.0
"""Within that a good policy should come."""
_WATCHED_S = 0.05
"""How often the policy in force is looked at."""

Pair = tuple[int, int]


def scaled(options: argparse.Namespace) -> Network:
    """Return the network of a file that was asked for."""
    network = load_network(options.network).scaled(options.rates_scale)
    return with_times_scaled(replace(network, changes=()) if options.static else network, options.times_scale)


def drawn(seed: int) -> Network:
    """Return a network that a seed draws, all rates of which change every 20 s, three times.

    In turns the links of the paper's network, a mesh, and one whose ways back have other rates. Seeds 0 to 2
    are for tuning, 10 to 14 for reports.
    """
    family, nodes = (("internet2", 9), ("mesh", 6), ("asymmetric", 6))[seed % 3]
    first, *others = (
        replace(generate(family, nodes, seed + 1000 * phase), routing=Routing.OVERLAY)
        for phase in range(_DRAWN_CHANGES + 1)
    )
    changes = (
        Change(at=_DRAWN_EVERY_S * phase, source=link.source, target=link.target, rate=link.rate)
        for phase, other in enumerate(others, 1)
        for link in other.links
    )
    return replace(first, changes=tuple(changes))


def later(network: Network) -> Network:
    """Return the network, whose changes come `WARM_S` later."""
    return replace(network, changes=tuple(replace(one, at=one.at + WARM_S) for one in network.changes))


def with_dips(network: Network, dip_s: float, until: float, seed: int) -> Network:
    """Return the network, each of whose links carries next to nothing for `dip_s`, once in 10 s."""
    chance = random.Random(seed)
    changes = [
        replace(one, rate=None) for one in network.changes if one.latency is not None or one.loss is not None
    ]
    for link in network.links:
        course = [(0.0, link.rate)] + [
            (one.at, one.rate)
            for one in network.changes
            if (one.source, one.target) == (link.source, link.target) and one.rate is not None
        ]
        course.sort()
        at = chance.uniform(0.0, DIP_EVERY_S)
        dips = []
        while at < until:
            dips.append(at)
            at += DIP_EVERY_S + chance.uniform(0.0, 0.6)
        plain = [(at, rate) for at, rate in course if at and not any(d <= at < d + dip_s for d in dips)]
        low = [(at, DIP_RATE) for at in dips]
        back = [(at + dip_s, max(one for one in course if one[0] <= at + dip_s)[1]) for at in dips]
        changes += [
            Change(at=at, source=link.source, target=link.target, rate=rate)
            for at, rate in sorted(plain + low + back)
        ]
    return replace(network, changes=tuple(sorted(changes, key=lambda one: one.at)))


class Teller:
    """Tells a scheduler the true rates, some time after each change, instead of what nodes measure."""

    def __init__(self, cluster: SimulatedCluster, network: Network, delay_s: float) -> None:
        self._truth: dict[Pair, float] = {(one.source, one.target): one.rate for one in network.links}
        self._size = network.size
        awareness = cluster.scheduler.machine.awareness
        assert awareness is not None
        self._collector: Collector = awareness.collector
        self._take = self._collector.record
        self._collector.record = self._taken  # type: ignore[method-assign]
        for at in sorted({one.at for one in network.changes}):
            cluster.at(at + delay_s, self._telling(cluster, network, at))

    def _telling(self, cluster: SimulatedCluster, network: Network, at: float) -> Callable[[], None]:
        def tell() -> None:
            for one in network.changes:
                if one.at == at and one.rate is not None:
                    self._truth[one.source, one.target] = one.rate
            for rank in range(self._size):
                into = [(source, rate) for (source, to), rate in self._truth.items() if to == rank]
                for _ in range(2):  # the second one confirms the first
                    links = tuple(
                        LinkMeasure(source=source, rate=rate, error=0.02, chunks=10, jumped=True)
                        for source, rate in into
                    )
                    self._take(rank, Measured(links=links), cluster.scheduler.now())

        return tell

    def _taken(self, rank: int, report: Measured, now: float) -> None:
        def true(ones: Iterable[LinkMeasure], *, into: bool) -> tuple[LinkMeasure, ...]:
            return tuple(
                msgspec.structs.replace(
                    one,
                    rate=self._truth[(one.source, rank) if into else (rank, one.source)] if one.rate else 0.0,
                    shared=0.0,
                    jumped=False,
                )
                for one in ones
            )

        self._take(
            rank,
            msgspec.structs.replace(
                report,
                links=true(report.links, into=True),
                outgoing=true(report.outgoing, into=False),
                egress=0.0,
                ingress=0.0,
            ),
            now,
        )


class PolicyWatch:
    """The policies of a job, each with the time from which it was in force."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._found: list[tuple[float, Policy]] = []
        self._look()

    def _look(self) -> None:
        policy, now = self._cluster.scheduler.machine.policy, self._cluster.now
        if not self._found or self._found[-1][1] is not policy:
            self._found.append((now, policy))
        self._cluster.at(now + _WATCHED_S, self._look)

    def good_after(self, network: Network, topology: str, options: Options) -> list[float]:
        """Return the seconds from each change of a network until the first policy that is good for it.

        Without one it is the time until the next change. The last change counts if it was followed by another
        time as long as the one before it.
        """
        phases = [*networks_by_time(network), (end_of_changes(network), network)]
        found = []
        for (begin, still), (end, _) in itertools.pairwise(phases[1:]):
            goal = _GOOD * expected_policy(still, form_with_options(still, topology, options), options)
            times = [max(begin, at) for at, _ in self._found] + [end]
            in_force = zip(times, times[1:], (policy for _, policy in self._found), strict=False)
            good = (
                start
                for start, until, policy in in_force
                if begin <= start < min(until, end) and expected_policy(still, policy, options) <= goal
            )
            found.append(next(good, end) - begin)
        return found


def race(network: Network, size: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return how one job fares."""
    until = WARM_S + (options.seconds or end_of_changes(network) or 100.0)
    course, moved = Course.of(network, size), later(network)
    cluster = SimulatedCluster(
        network.size,
        network=with_dips(moved, options.dips, until, options.dip_seed) if options.dips else moved,
        seed=seed,
        awareness=True,
        topology=options.topology,
        aux_path=options.auxiliary,
        chunk_size=options.chunk // 4,
        forming_s=options.forming,
    ).join()
    if options.told is not None:
        Teller(cluster, moved, options.told)
    watch = PolicyWatch(cluster)
    values = np.ones(size // 4, np.float32)
    rounds = []
    while cluster.now < until:
        begin = cluster.now
        pending = [node.push("w", values, in_place=True) for node in cluster.nodes]
        cluster.run_until_ended(pending, _LONGEST_ROUND_S)
        for one in pending:
            if not (one.result() == network.size).all():
                raise AssertionError(f"{one.what}: a wrong sum")
        for node in cluster.nodes:
            node.pending.clear()
        if cluster.now > WARM_S:
            rounds.append((begin - WARM_S, cluster.now - begin))
    job = cluster.scheduler.machine.job
    assert job is not None
    forming = Options(chunk_bytes=job.keys.chunk_bytes, tensors=(size,))
    good = [] if options.seconds or options.static else watch.good_after(moved, options.topology, forming)
    return {
        "bytes": size,
        "seed": seed,
        "of_optimum": course.of_optimum(rounds),
        "good_after_s": [round(took, 2) for took in good],
        "rounds_s": [round(took, 4) for _, took in rounds],
        "policies": cluster.scheduler.machine.policy.version,
    }


def main() -> None:
    """Run what was asked for, print it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--network", type=Path, default=Path("examples/networks/internet2.yaml"))
    parser.add_argument("--sizes", type=amounts, default=[16_000_000, 64_000_000], metavar="SIZE,...")
    parser.add_argument("--seeds", type=number, default=4, help="jobs of each size")
    parser.add_argument(
        "--drawn", type=seeds, metavar="N[..M]", help="a job on the network of each of these seeds"
    )
    parser.add_argument("--rates-scale", type=factor, default=0.25)
    parser.add_argument("--times-scale", type=factor, default=1 / 9)
    parser.add_argument(
        "--seconds", type=seconds, help="after the first 20; default: to the end of the changes"
    )
    parser.add_argument("--static", action="store_true", help="nothing changes")
    parser.add_argument("--dips", type=seconds, default=0.0, metavar="S", help="as long, once in 10 s a link")
    parser.add_argument("--dip-seed", type=number, default=5, help="of when they come")
    parser.add_argument("--told", type=seconds, metavar="S", help="rates are told so long after each change")
    parser.add_argument("--topology", default="packing")
    parser.add_argument("--auxiliary", action="store_true", help="with auxiliary paths")
    parser.add_argument("--chunk", type=number, default=65_536, help="bytes")
    parser.add_argument("--forming", type=seconds, default=0.4, metavar="S", help="what a formation takes")
    parser.add_argument("--json", type=writable, metavar="FILE")
    options = parser.parse_args()
    if options.drawn is None:
        try:
            networks = dict.fromkeys(range(1, options.seeds + 1), scaled(options))
        except NetStormError as error:
            parser.error(str(error))
    else:
        networks = {seed: drawn(seed).scaled(options.rates_scale) for seed in options.drawn}
    rows = []
    for size in options.sizes:
        for seed, network in networks.items():
            row = race(network, size, seed, options)
            rows.append(row)
            print(
                f"{megabytes(size)} seed {seed}: {row['of_optimum']:.3f} of the optimum, "
                f"{len(row['rounds_s'])} rounds, {row['policies']} policies, good ones "
                f"{', '.join(f'{took:.1f}' for took in row['good_after_s'])} s after changes",
                flush=True,
            )
        found = [row["of_optimum"] for row in rows if row["bytes"] == size]
        print(f"{megabytes(size)}: mean {statistics.fmean(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        if good := [took for row in rows if row["bytes"] == size for took in row["good_after_s"]]:
            quick = sum(took <= _SOON_S for took in good)
            print(
                f"{megabytes(size)}: first good policy {statistics.median(good):.2f} s after a change "
                f"(median), within {_SOON_S:g} s after {quick} of {len(good)}"
            )
    if options.json is not None:
        asked = {
            name: value for name, value in vars(options).items() if name not in ("json", "network", "drawn")
        }
        options.json.write_text(json.dumps({"settings": asked, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
