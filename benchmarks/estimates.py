#!/usr/bin/env python3
"""What nodes measure of their links, against what these are: on simulated networks and on an emulated WAN.

    netstorm bench estimates --json estimates.json
    netstorm bench estimates --families mesh --estimators busy,paper --clock-error 0.05 --drift 5e-5
    netstorm bench estimates --wan examples/networks/internet2.yaml --rounds 10 --megabytes 16

The policy stays as it is. Errors are those of the last reports after all rounds; caps are those that the
scheduler knows of then. On the emulated WAN (needs root) a link's rate is what TCP's payload has of it. A
rate that was only seen while others shared an access line is a lower bound; it is counted by itself.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from netstorm.errors import NetStormError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.process import LocalClock
from netstorm.observe.private_files import write_private
from netstorm.protocol.frames import Buffer, open_frames
from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.settings import child_environment
from netstorm.topology.files import dump_network, load_network
from netstorm.topology.network import FAMILIES, Network, Rank, generate

_GOODPUT = 1448 / 1538
"""Of Ethernet's 1538 bytes for a full packet, TCP with time stamps carries 1448."""
_NEVER_S = 1e6
_LOWER_BOUND = 0.5
"""Part of the time that was shared from which on a rate is counted as a lower bound."""

AccessCaps: TypeAlias = Mapping[int, tuple[float, float]]
"""Bit/s out and in, by rank; 0: not known."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a network, and return the exit code."""
    options = _options(arguments)
    cases = []
    try:
        for found in _on_wan(options) if options.wan else _simulated(options):
            cases.append(found)
            print(_line(found), flush=True)
    except (NetStormError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="netstorm bench estimates", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--families", default="mesh,asymmetric,cloud", metavar="NAMES", help=", ".join(FAMILIES)
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="networks of each; default 3")
    parser.add_argument("--nodes", type=int, default=9, metavar="N", help="default 9")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default 10")
    parser.add_argument("--megabytes", type=float, default=8, metavar="MB", help="of a round; default 8")
    parser.add_argument("--topology", default="fapt", metavar="NAME", help="trees; default fapt")
    parser.add_argument("--estimators", default="tcp", metavar="NAMES", help="tcp, busy, paper; default tcp")
    parser.add_argument("--clock-error", type=float, default=0.0, metavar="S", help="of every second node")
    parser.add_argument("--drift", type=float, default=0.0, metavar="X", help="of every second node, in s/s")
    parser.add_argument(
        "--clock",
        choices=("none", "scheduler", "trees"),
        default="none",
        help="whom nodes ask for the time; default none: clocks stay wrong",
    )
    parser.add_argument("--wan", type=Path, metavar="FILE", help="emulate this network instead (needs root)")
    parser.add_argument("--rates-scale", type=float, default=1.0, metavar="X", help="of the emulated network")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all of it")
    return parser.parse_args(arguments)


# ----------------------------------------------------------------------------------------------- simulated


def _simulated(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for family in options.families.split(","):
        for seed in range(options.seeds):
            network = generate(family, options.nodes, seed)
            for estimator in options.estimators.split(","):
                reports, caps, share = _train(network, options, seed, estimator)
                names = {"network": f"{family} {seed}", "estimator": estimator, "clock": options.clock}
                yield names | _compare(network, reports, caps, 1.0) | {"reports_share_of_bytes": share}


def _train(
    network: Network, options: argparse.Namespace, seed: int, estimator: str
) -> tuple[dict[int, Measured], AccessCaps, float]:
    """Return what is known at each rank after all rounds, the caps that the scheduler knows of, and the
    reports' part of all bytes.
    """

    def clock(rank: int) -> LocalClock:
        wrong = rank % 2
        return LocalClock(
            offset_s=1000.0 * rank,
            drift=options.drift * wrong,
            sync_error_s=options.clock_error * wrong,
            sync_drift=options.drift * wrong,
        )

    common: dict[str, Any] = {"network": network, "topology": options.topology, "seed": seed}
    policy = SimulatedCluster(network.size, **common).policy
    cluster = SimulatedCluster(
        network.size,
        **common,
        policy=policy,
        clocks=clock,
        awareness=True,
        update_time_s=_NEVER_S,
        estimator=estimator,
        sync_clocks=options.clock != "none",
        clock_source="scheduler" if options.clock == "none" else options.clock,
    ).join()
    sent = [0, 0]
    others = cluster.network.watch
    assert others is not None

    def watch(source: str, target: str, header: bytes, payload: Buffer | None) -> None:
        others(source, target, header, payload)
        sent[0] += len(header) + (0 if payload is None else len(payload))
        if target == "scheduler" and isinstance(open_frames(header, 1).message, Measured):
            sent[1] += len(header)

    cluster.network.watch = watch
    ones = np.ones(int(options.megabytes * 250_000), np.float32)
    for _ in range(options.rounds):
        pending = [node.push("tensor", ones) for node in cluster.nodes]
        cluster.run_until_ended(pending, _NEVER_S)
        for node in cluster.nodes:
            node.pending.clear()
    cluster.run_for(3.0)  # the last reports
    meters = {node.rank: node.machine.meter for node in cluster.nodes}
    known = {rank: meter.known() for rank, meter in meters.items() if meter is not None}
    awareness = cluster.scheduler.machine.awareness
    assert awareness is not None
    return known, awareness.collector.access_caps(cluster.now), sent[1] / sent[0]


# ------------------------------------------------------------------------------------------------- emulated


def _on_wan(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    network = replace(load_network(options.wan).scaled(options.rates_scale), changes=())
    for estimator in options.estimators.split(","):
        with tempfile.TemporaryDirectory(prefix="netstorm-estimates-") as name:
            folder = Path(name)
            (folder / "network.yaml").write_text(dump_network(network), encoding="utf-8")
            write_private(folder / "web.token", secrets.token_hex(32).encode())
            node = [sys.executable, str(Path(__file__).parent / "workers" / "estimates.py")]
            words = [sys.executable, "-m", "netstorm", "launch", "--wan", str(folder / "network.yaml")]
            words += ["--network", str(folder / "network.yaml"), "--topology", options.topology, "--"]
            subprocess.run(
                [*words, *node, name, str(options.rounds), str(options.megabytes), "caps"],
                env=child_environment(
                    UPDATE_TIME=f"{_NEVER_S:.0f}",
                    NETSTORM_ESTIMATOR=estimator,
                    NETSTORM_HTTP_BIND="*",
                    NETSTORM_WEB_TOKEN_FILE=str(folder / "web.token"),
                ),
                stdout=sys.stderr,
                check=True,
            )
            found = {
                rank: json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
                for rank in network.ranks
            }
        reports = {rank: msgspec.convert(one["measured"], Measured) for rank, one in found.items()}
        caps = {int(rank): (one["cap"]["egress"], one["cap"]["ingress"]) for rank, one in found.items()}
        compared = _compare(network, reports, caps, _GOODPUT)
        yield {"network": str(options.wan), "estimator": estimator} | compared


# -------------------------------------------------------------------------------------------------- the same


def _believed(
    reports: Mapping[Rank, Measured] | Mapping[int, Measured],
) -> dict[tuple[int, int], LinkMeasure]:
    """Return what counts for the scheduler, by (source, target): the word of the source's kernel, or the
    target's.
    """
    found = {(one.source, int(rank)): one for rank, report in reports.items() for one in report.links}
    for rank, report in reports.items():
        found |= {(int(rank), one.source): one for one in report.outgoing if one.delivered}
    return found


def _compare(
    network: Network,
    reports: Mapping[Rank, Measured] | Mapping[int, Measured],
    known: AccessCaps,
    goodput: float,
) -> dict[str, Any]:
    links: list[dict[str, Any]] = []
    caps: list[dict[str, Any]] = []
    for (source, target), one in _believed(reports).items():
        truth = network.link(Rank(source), Rank(target))
        links.append(
            {
                "link": f"{source}→{target}",
                "rate": truth.rate * goodput,
                "measured": one.rate,
                "error": one.rate / (truth.rate * goodput) - 1,
                "standard_error": one.error,
                "shared": one.shared,
                "latency": truth.latency,
                "measured_latency": one.latency,
                "chunks": one.chunks,
                "delivered": one.delivered,
            }
        )
    for rank, (egress, ingress) in known.items():
        node = network.nodes[rank]
        for word, value, cap in (("egress", egress, node.egress), ("ingress", ingress, node.ingress)):
            if value:
                error = None if cap is None else value / (cap * goodput) - 1
                caps.append({"line": f"{word} {rank}", "measured": value, "error": error})
    every = [abs(one["error"]) for one in links]
    full = [abs(one["error"]) for one in links if one["shared"] < _LOWER_BOUND]
    late = [abs(one["measured_latency"] - one["latency"]) for one in links if one["measured_latency"] >= 0]
    return {
        "links_measured": len(links),
        "lower_bounds": len(links) - len(full),
        "median_error": statistics.median(every) if every else None,
        "worst_error": max(every, default=None),
        "within_10_percent": sum(error <= 0.1 for error in every),
        "median_error_without_lower_bounds": statistics.median(full) if full else None,
        "median_latency_error_s": statistics.median(late) if late else None,
        "caps": caps,
        "links": links,
    }


def _line(found: dict[str, Any]) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    caps = ", ".join(f"{one['line']} {percent(one['error'])}" for one in found["caps"]) or "none"
    late, others = found["median_latency_error_s"], found["median_error_without_lower_bounds"]
    latency = "-" if late is None else f"{late * 1e3:.1f} ms"
    return (
        f"{found['network']:14s} {found['estimator']:5s} {found['links_measured']:3d} links: median "
        f"{percent(found['median_error'])}, worst {percent(found['worst_error'])}; "
        f"{found['lower_bounds']} are "
        f"lower bounds, median of the others {percent(others)}; latency off by {latency}; caps: {caps}"
    )


if __name__ == "__main__":
    sys.exit(main())
