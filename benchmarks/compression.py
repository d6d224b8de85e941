#!/usr/bin/env python3
"""What gradient compression costs in bytes and time on this machine's loopback, where links cost nothing.

    python benchmarks/compression.py                                 3 nodes, 40 MB of float32

Plain and compressed rounds of two keys take turns. On links that are slow the time follows the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from harness.arguments import amount, megabytes, number, seconds
from harness.child import ChildError
from harness.group import Group
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case
from systems.netstorm_store import NetStormStore


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    case = Case(nodes=options.nodes, bytes=options.size, keys=1)
    command = [sys.executable, str(BENCHMARKS / "workers" / "compression.py"), str(options.size)]
    times: dict[str, list[float]] = {"plain": [], "2bit": []}
    sent: dict[str, list[float]] = {"plain": [], "2bit": []}
    try:
        with Group(
            NetStormStore().launch(case).running(command),
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
        ) as group:
            for turn in range(2 + options.rounds):
                for key, measured in times.items():
                    answers = group.ask({"do": "round", "key": key})
                    if turn >= 2:
                        first = min(answer["start"] for answer in answers)
                        measured.append(max(answer["finish"] for answer in answers) - first)
                        sent[key].append(sum(answer["bytes"] for answer in answers))
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{options.nodes} nodes, {megabytes(options.size)} of float32, {options.rounds} rounds")
    for key, measured in times.items():
        took, carried = statistics.median(measured), statistics.median(sent[key])
        print(f"{key:6} {1000 * took:8.1f} ms a round, {carried / 1e6:8.2f} MB sent by all nodes together")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes and times of rounds with and without compression.")
    add = parser.add_argument
    add("--nodes", type=number, default=3, metavar="N", help="default 3")
    add("--size", type=amount, default=amount("40MB"), metavar="SIZE", help="of the gradient; default 40MB")
    add("--rounds", type=number, default=10, metavar="N", help="rounds of each kind; default 10")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="for a start or a round; default 120")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
