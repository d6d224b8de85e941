#!/usr/bin/env python3
"""Real systems side by side on one emulated network: what an all-reduce takes over slow, unequal links.

    netstorm bench wan examples/networks/internet2.yaml --systems mxnet-star-best,gloo,netstorm-packing
    netstorm bench wan NETWORK.yaml --sizes 16MB,64MB --rounds 5 --json out.json --plot out.png

Each rank has a network namespace of its own; all programs are the published ones, unmodified, with their
recommended settings, which the results hold. They stay alive and take turns, a round each. A round lasts from
the first worker's start until the last one can read the sum; then every element is checked. Results are
written after every round: Ctrl-C loses none.

    netstorm bench wan examples/networks/internet2.yaml --dynamic --times-scale 1/9 --systems netstorm-std

With --dynamic systems cannot take turns: each has the same changes at the same times, alone, on a network
whose changes begin with its first round that counts, until the last rates have been there as long as those
before them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from harness.compare import Comparison
from harness.emulated import Place, emulated, on_loopback
from harness.machine import describe_machine
from harness.progress import Rounds, counted_rounds
from harness.results import Row
from harness.stopping import stop_on_sigterm
from netstorm.cli.support import scratch_folder
from netstorm.errors import NetStormError, UsageError
from netstorm.topology.files import load_network, tensors_of
from netstorm.topology.lower_bound import LowerBound, lower_bound
from netstorm.topology.network import Network
from netstorm.topology.resources import optimum
from race.course import (
    Course,
    end_of_changes,
    networks_by_time,
    with_course_repeated,
    with_times_scaled,
)
from race.options import race_options
from race.plot import draw_race
from race.policy_log import policy_changes
from race.results import RaceResults, RaceRow
from systems.base import Case, System
from systems.entrants import Entry, enter

_MEMORY_LIMIT = 24 * 1024**3
_MEMORY_SHARE = 0.8
"""Of what is free: other programs grow too, and a machine that swaps measures its disk."""

_KEPT = ("rounds", "warmup", "seconds", "seed", "knowledge")
"""Options that the results hold."""

_PAYLOAD_SHARE = 1460 / 1500
"""At most, of a packet: the rest are headers of IP and TCP. Systems differ in what they cut values into."""

_GOODPUT = 1448 / 1538
"""Of Ethernet's 1538 bytes for a full packet, TCP with time stamps carries 1448."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Race, and return the exit code: 1 if a system failed, 2 if it cannot begin, 130 after Ctrl-C."""
    options = race_options(arguments)
    stop_on_sigterm()
    try:
        network = _network(options)
        with scratch_folder() as folder:
            return _race(options, network, folder)
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _race(options: argparse.Namespace, network: Network, folder: Path) -> int:
    results = RaceResults(
        network=_describe(options, network),
        machine=describe_machine(),
        options={name: getattr(options, name) for name in _KEPT},
    )
    try:
        with counted_rounds(Console(stderr=True), None if options.seconds else options.rounds) as rounds:
            race = _one_after_the_other if options.dynamic else _side_by_side
            race(options, network, folder, results, rounds)
    except KeyboardInterrupt:
        results.interrupted = True
    results.save(options.json)
    show = results.show_shortly if options.short else results.show
    show(_output())
    if options.plot is not None and any(row.median_s for row in results.rows):
        draw_race(results.as_json(), options.plot)
    if results.interrupted:
        return 130
    return int(any(row.error and not row.entrant.why_not for row in results.rows))


def _side_by_side(
    options: argparse.Namespace,
    network: Network,
    folder: Path,
    results: RaceResults,
    rounds: Rounds,
) -> None:
    """Have all systems alive on one network, and take turns, a round each."""
    with _up(options)(network, options) as place:
        results.network |= _describe_place(place)
        for case in _cases(options, network, place):
            rows = _rows(options, network, case, folder)
            results.rows.extend(rows)
            systems = [system for row in rows for system in row.entrant.systems]
            parts = {name: part for row in rows for name, part in row.parts.items()}
            comparison = _comparison(options, systems, place, results, rounds, logs=options.logs)
            comparison.run(case, parts, _free_memory())
            results.save(options.json)
            _collect(options, folder, rows)


def _one_after_the_other(
    options: argparse.Namespace,
    network: Network,
    folder: Path,
    results: RaceResults,
    rounds: Rounds,
) -> None:
    """Have each system alone on a network of its own; changes begin with its first round that counts."""
    logs = options.logs or folder
    for size in _cases(options, network, None):
        rows = _rows(options, network, size, folder)
        results.rows.extend(rows)
        for row in rows:
            for system in row.entrant.systems:
                with _up(options)(network, options) as place:
                    results.network |= _describe_place(place)
                    case = place.located(size)
                    part = row.parts[system.name]
                    began: list[float] = []

                    def on_start(place: Place = place, began: list[float] = began) -> None:
                        began.append(time.time())
                        place.start_changes()

                    comparison = _comparison(
                        options, [system], place, results, rounds, on_start=on_start, logs=logs
                    )
                    comparison.run(case, {system.name: part}, _free_memory())
                    log = logs / f"{system.name} scheduler.log"
                    if began and system.name.startswith("netstorm") and log.exists():
                        part.policies = policy_changes(log.read_text(errors="replace"), began[0])
                    results.save(options.json)
        _collect(options, folder, rows)


def _comparison(
    options: argparse.Namespace,
    systems: list[System],
    place: Place,
    results: RaceResults,
    rounds: Rounds,
    *,
    on_start: Callable[[], None] | None = None,
    logs: Path | None = None,
) -> Comparison:
    def on_round(name: str) -> None:
        rounds.done(name)
        results.save(options.json)

    return Comparison(
        systems,
        rounds=options.rounds,
        warmup=options.warmup,
        start_timeout_s=options.timeout,
        round_timeout_s=options.timeout,
        on_round=on_round,
        on_step=rounds.begins,
        place=place.command,
        meter=place.carried,
        seconds=options.seconds,
        on_start=on_start,
        logs=logs,
    )


def _free_memory() -> int:
    return min(_MEMORY_LIMIT, int(psutil.virtual_memory().available * _MEMORY_SHARE))


def _rows(options: argparse.Namespace, network: Network, case: Case, folder: Path) -> list[RaceRow]:
    still = replace(network, changes=())
    entry = Entry(
        network=network,
        folder=folder,
        bytes=case.bytes,
        model=case.model,
        seed=options.seed,
        trace=options.trace is not None,
        variables=options.set,
        knowledge=options.knowledge,
    )
    best = optimum(still, case.bytes).seconds
    bound = _bound(still, case).seconds
    course = Course.of(network, case.bytes) if options.dynamic else None
    bounds = course and replace(
        course, optima=tuple(_bound(phase, case).seconds for _, phase in networks_by_time(network))
    )
    return [
        RaceRow(
            entrant=entrant,
            case=case,
            optimum_s=best,
            bound_s=bound,
            goodput=_GOODPUT,
            parts={system.name: Row(system=system, case=case) for system in entrant.systems},
            course=course,
            bounds=bounds,
        )
        for entrant in enter(options.systems, entry)
    ]


def _bound(network: Network, case: Case) -> LowerBound:
    best = optimum(network, case.bytes)
    return lower_bound(network, best, [4 * size for size in case.sizes], payload_share=_PAYLOAD_SHARE)


def _up(options: argparse.Namespace) -> Callable[..., contextlib.AbstractContextManager[Place]]:
    return on_loopback if options.loopback else emulated


def _cases(options: argparse.Namespace, network: Network, place: Place | None) -> list[Case]:
    if options.model:
        size = sum(tensors_of(options.model))
        cases = [Case(nodes=network.size, bytes=size, model=options.model)]
    else:
        cases = [Case(nodes=network.size, bytes=size, keys=options.keys) for size in options.sizes]
    return cases if place is None else [place.located(case) for case in cases]


def _network(options: argparse.Namespace) -> Network:
    network = load_network(options.network).scaled(options.rates_scale)
    if options.loss is not None:
        network = replace(network, links=tuple(replace(link, loss=options.loss) for link in network.links))
    if not options.dynamic:
        network = replace(network, changes=())
    network = with_course_repeated(with_times_scaled(network, options.times_scale), options.repeat)
    if options.dynamic and options.seconds is None:
        options.seconds = end_of_changes(network)
        if not options.seconds:
            raise UsageError(f"{options.network} has no changes: nothing is dynamic about it")
    return network


def _describe(options: argparse.Namespace, network: Network) -> dict[str, Any]:
    still = replace(network, changes=())
    cases = _cases(options, network, None)
    sizes = [case.bytes for case in cases]
    certificates = {str(case.bytes): _bound(still, case).certificate() for case in cases}
    known = {
        "file": str(options.network),
        "nodes": network.size,
        "links": [
            {
                "from": link.source,
                "to": link.target,
                "rate": link.rate,
                "latency": link.latency,
                "loss": link.loss,
            }
            for link in network.links
        ],
        "routing": network.routing.value,
        "rates_scale": options.rates_scale,
        "loss": "as in the file" if options.loss is None else f"{options.loss:.3%}",
        "dynamic": options.dynamic,
        "backend": "",
        "congestion": "",
        "goodput": _GOODPUT,
        "optimum_s": {str(size): optimum(still, size).seconds for size in sizes},
        "certificates": {} if options.dynamic else certificates,
    }
    if options.dynamic:
        known |= {"times_scale": options.times_scale, "repeat": options.repeat}
        courses = {str(size): Course.of(network, size) for size in sizes}
        known["course"] = {
            size: {"begins_s": course.begins, "optima_s": course.optima} for size, course in courses.items()
        }
    return known


def _describe_place(place: Place) -> dict[str, str]:
    return {"backend": place.backend, "congestion": place.congestion}


def _collect(options: argparse.Namespace, folder: Path, rows: list[RaceRow]) -> None:
    """Join the timelines of each NetStorm job's nodes into one file a system."""
    if options.trace is None:
        return
    from netstorm.observe.trace import join_traces  # noqa: PLC0415 - only with --trace

    target = options.trace
    traced = [row.entrant.name for row in rows if list(folder.glob(f"{row.entrant.name}.trace.*json"))]
    for name in traced:
        path = target if len(traced) == 1 else target.with_name(f"{target.stem}-{name}{target.suffix}")
        join_traces(sorted(folder.glob(f"{name}.trace.*json")), path)


def _output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=150)  # a file has room for the table


if __name__ == "__main__":
    sys.exit(main())
