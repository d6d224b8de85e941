#!/usr/bin/env python3
"""What not knowing the network costs, on networks that no constant was tuned on: a job without a network file
beside one that is given the rates.

    netstorm bench unseen --seed 100..119 --simulated --json unseen.json
    netstorm bench unseen --seed 100 --rounds 13           # real nodes on an emulated network; needs root

Each seed draws a network of 5 to 12 nodes: sparse (`internet2`: routers that are also nodes), mesh,
asymmetric, or access-limited (`cloud`). Its figure is the median round after the first ten over that of the
informed job. Simulated, each job runs alone on virtual time; emulated, they take turns, a round each. Seeds 0
to 19 are for tuning, 100 to 119 for reports.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness.arguments import amount, factor, folder, number, seconds, seeds, writable
from harness.compare import Comparison
from harness.emulated import emulated
from harness.results import Row
from harness.stopping import stop_on_sigterm
from learning import rounds
from netstorm.cli.support import scratch_folder
from netstorm.errors import NetStormError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.network import Network, generate
from systems.base import Case
from systems.entrants import Entry, enter

LEARNT: Final = 10
"""Rounds that a job has to learn its network in."""
_FAMILIES: Final = ("internet2", "mesh", "cloud", "asymmetric")
_NODES: Final = (5, 12)
_INFORMED: Final = "netstorm-auto"
_UNINFORMED: Final = "netstorm-auto@NETSTORM_NETWORK="
_INFORMED_ROUNDS: Final = 4
"""Of a simulated job that knows its network: all but the first take the same time."""
_MEMORY_LIMIT: Final = 8 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A network that a seed draws, and how the two jobs fared on it."""

    seed: int
    family: str
    nodes: int
    informed_s: tuple[float, ...]
    uninformed_s: tuple[float, ...]
    policies: int | None = None
    """Of the job that was told nothing, at its end; None: not known."""

    @property
    def by_round(self) -> list[float]:
        """Time of each round over the informed job's median, of all rounds but its first."""
        usual = statistics.median(self.informed_s[1:])
        return [took / usual for took in self.uninformed_s]

    @property
    def ratio(self) -> float:
        """Median of the rounds after the first ten over the informed job's."""
        return statistics.median(self.by_round[LEARNT:])

    def as_json(self) -> dict[str, Any]:
        """Return what is written."""
        return {
            "seed": self.seed,
            "family": self.family,
            "nodes": self.nodes,
            "ratio": self.ratio,
            "by_round": [round(one, 3) for one in self.by_round],
            "informed_s": self.informed_s,
            "uninformed_s": self.uninformed_s,
            "policies": self.policies,
        }

    def __str__(self) -> str:
        """Return a line for people."""
        rounds_text = " ".join(f"{one:.2f}" for one in self.by_round)
        return (
            f"seed {self.seed:3d}, {self.family}, {self.nodes} nodes: x{self.ratio:.3f} "
            f"of {statistics.median(self.informed_s[1:]):.3g} s; by round {rounds_text}"
        )


def draw(seed: int) -> tuple[str, Network]:
    """Return the family and the network of a seed."""
    family = _FAMILIES[seed % len(_FAMILIES)]
    return family, generate(family, random.Random(seed).randint(*_NODES), seed)


def simulate(seed: int, options: argparse.Namespace) -> Unseen:
    """Return how the two jobs fare in the simulated cluster."""
    family, network = draw(seed)
    network = network.scaled(options.rates_scale)
    values = np.ones(options.size // 4, np.float32)
    common: dict[str, Any] = {
        "network": network,
        "seed": seed,
        "topology": "auto",
        "model": f"{options.size}B",
    }
    informed = SimulatedCluster(network.size, **common).join()
    uninformed = SimulatedCluster(network.size, awareness=True, knows_links=False, **common).join()
    return Unseen(
        seed=seed,
        family=family,
        nodes=network.size,
        informed_s=tuple(rounds(informed, _INFORMED_ROUNDS, values)),
        uninformed_s=tuple(rounds(uninformed, options.rounds, values)),
        policies=uninformed.scheduler.machine.policy.version,
    )


def emulate(seed: int, options: argparse.Namespace, scratch: Path) -> Unseen:
    """Return how the two jobs fare with real nodes, in turns."""
    family, network = draw(seed)
    network = network.scaled(options.rates_scale)
    case = Case(nodes=network.size, bytes=options.size)
    entry = Entry(network=network, folder=scratch, bytes=options.size, seed=seed)
    systems = [system for one in enter([_INFORMED, _UNINFORMED], entry) for system in one.systems]
    rows = {system.name: Row(system=system, case=case) for system in systems}
    with emulated(network, options) as place:
        comparison = Comparison(
            systems,
            rounds=options.rounds,
            warmup=0,
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
            on_round=lambda _: None,
            place=place.command,
            logs=options.logs,
        )
        comparison.run(place.located(case), rows, _MEMORY_LIMIT)
    for name, row in rows.items():
        if row.error:
            raise NetStormError(f"seed {seed}, {name}: {row.error}")
    return Unseen(
        seed=seed,
        family=family,
        nodes=network.size,
        informed_s=tuple(rows[_INFORMED].rounds_s),
        uninformed_s=tuple(rows[_UNINFORMED].rounds_s),
    )


def summary(found: Sequence[Unseen]) -> str:
    """Return all networks, the worst first, and how many keep the goal."""
    worst = sorted(found, key=lambda one: -one.ratio)
    middle = statistics.median(one.ratio for one in found)
    within = sum(one.ratio <= 1.05 for one in found)
    return "\n".join(
        [
            *(f"x{one.ratio:.3f}  seed {one.seed}, {one.family}, {one.nodes} nodes" for one in worst),
            f"after {LEARNT} rounds: median x{middle:.3f}, at most 5 % slower on {within} of {len(found)}",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both jobs on the network of each seed, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    found: list[Unseen] = []
    try:
        with scratch_folder() as scratch:
            for seed in options.seed:
                one = simulate(seed, options) if options.simulated else emulate(seed, options, scratch)
                found.append(one)
                print(one, flush=True)
                _write(found, options)
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(summary(found))
    return 0


def _write(found: Sequence[Unseen], options: argparse.Namespace) -> None:
    if options.json is None:
        return
    settings = {name: getattr(options, name) for name in ("size", "rounds", "rates_scale", "simulated")}
    content = {"settings": settings, "networks": [one.as_json() for one in found]}
    options.json.write_text(json.dumps(content, indent=1) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="netstorm bench unseen", description=(__doc__ or "").split("\n\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add(
        "--seed",
        type=seeds,
        required=True,
        metavar="N[..M]",
        help="whose networks are drawn, such as 100..119",
    )
    add(
        "--simulated", action="store_true", help="on virtual time; default: real nodes, emulated (needs root)"
    )
    add("--size", type=amount, default=8_000_000, help="of a round; default 8MB")
    add("--rounds", type=_more_than_learnt, default=LEARNT + 3, metavar="N", help="default 13")
    add("--rates-scale", type=factor, default=0.25, metavar="X", help="times all rates; default 0.25")
    add("--timeout", type=seconds, default=180.0, metavar="S", help="for a start or a round; default 180")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    add("--logs", type=folder, metavar="FOLDER", help="keep what each process of an emulated job says there")
    add("--json", type=writable, metavar="FILE", help="write the results, after every network")
    return parser.parse_args(arguments)


def _more_than_learnt(text: str) -> int:
    if number(text) <= LEARNT:
        raise argparse.ArgumentTypeError(f"{text} rounds: expected more than {LEARNT}, in which jobs learn")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
