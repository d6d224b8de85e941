#!/usr/bin/env python3
"""Two real jobs on the same hosts of an emulated WAN: rounds of one alone, beside the other, and before it.

python benchmarks/studies/wan_priorities.py examples/networks/pair.yaml --json priorities.json

Needs root. The jobs have schedulers, nodes and trees of their own; rank r of each is on host r. While the
first job's rounds are timed, the second one sums without a pause: not at all (alone), with the same right
(fair), and with a smaller NETSTORM_JOB_PRIORITY. The three take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, factor, number, seconds, writable
from harness.child import ChildError
from harness.emulated import Place, emulated
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from netstorm.errors import NetStormError
from netstorm.topology.files import load_network
from systems.base import Case, Launch
from systems.netstorm_store import NetStormStore

_PRIORITY: Final = "NETSTORM_JOB_PRIORITY"
TURNS: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, str] | None]]] = {
    "alone": ({}, None),
    "fair": ({}, {}),
    "priority": ({_PRIORITY: "2"}, {_PRIORITY: "1"}),
}
"""The variables of the job that is timed, and of the one beside it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all turns, print a table, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    network = replace(load_network(str(options.network)).scaled(options.rates_scale), changes=())
    rows: list[dict[str, Any]] = []
    try:
        with emulated(network, options) as place:
            case = place.located(Case(nodes=network.size, bytes=options.size))
            for turn in range(options.turns):
                for name in TURNS:
                    times = timed(place, case, name, options)
                    rows.append({"turn": turn, "what": name, **times})
                    print(f"turn {turn}: {name}: {statistics.median(times['rounds_s']):.2f} s", flush=True)
    except (NetStormError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if options.json:
        shown = {**vars(options), "network": str(options.network), "json": None}
        content = {"machine": describe_machine(), "options": shown, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


def timed(place: Place, case: Case, turn: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds of the first job's rounds, and of the second one's meanwhile."""
    first, second = TURNS[turn]
    limits = {"start_timeout_s": options.timeout, "round_timeout_s": options.timeout}
    with contextlib.ExitStack() as stack:
        timed_job = stack.enter_context(Group(_launch(place, case, "first", first), **limits))
        timed_job.round(0)  # opens connections, and checks a sum
        if second is None:
            return {"rounds_s": [_round(timed_job, number) for number in range(1, options.rounds + 1)]}
        other_job = stack.enter_context(Group(_launch(place, case, "second", second), **limits))
        other_job.round(0)
        other = _Endless(other_job)
        try:
            times = [_round(timed_job, number) for number in range(1, options.rounds + 1)]
        finally:
            meanwhile = other.stop()
        return {"rounds_s": times, "others_s": meanwhile}


def _round(group: Group, number: int) -> float:
    """Return the seconds of a sum of what the one before has left."""
    answers = group.ask({"do": "allreduce", "round": number})
    return float(max(answer["finish"] for answer in answers) - min(answer["start"] for answer in answers))


class _Endless:
    """Has a group sum without a pause, in a thread."""

    def __init__(self, group: Group) -> None:
        self._group, self._ended, self._times = group, threading.Event(), list[float]()
        self._error: ChildError | None = None
        self._thread = threading.Thread(target=self._run, name="rounds of the second job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._times.append(_round(self._group, 1 + len(self._times)))
        except ChildError as error:
            self._error = error

    def stop(self) -> list[float]:
        """End after the round under way, which has a time-out, and return the seconds of each.

        Raises:
            ChildError: a process failed.
        """
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._times


def _launch(place: Place, case: Case, name: str, variables: Mapping[str, str]) -> Launch:
    store = NetStormStore(name=name, variables={"ENABLE_AWARENESS": "0", **variables})
    return store.launch(case).placed(place.command)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return medians of the rounds of all turns, and over those alone."""
    medians = {
        name: statistics.median(time for row in rows if row["what"] == name for time in row["rounds_s"])
        for name in TURNS
    }
    lines = [
        f"{name:10} {median:6.2f} s a round, {median / medians['alone']:.2f} of alone"
        for name, median in medians.items()
    ]
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("network", type=Path, metavar="NETWORK.yaml", help="what is emulated")
    parser.add_argument("--rates-scale", type=factor, default=1.0, metavar="X")
    parser.add_argument("--size", type=amount, default=4_000_000, help="of a round of each job")
    parser.add_argument("--rounds", type=number, default=8, metavar="N", help="of a turn that count")
    parser.add_argument("--turns", type=number, default=2, metavar="N")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="of the emulation")
    parser.add_argument("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="for a start or a round")
    parser.add_argument("--json", type=writable, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
