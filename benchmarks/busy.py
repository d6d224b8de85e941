"""What it costs rounds that one rank's main thread is busy meanwhile, on a network that sets their pace.

    netstorm launch -n 2 --wan examples/networks/pair.yaml -- python benchmarks/busy.py 16MB 10

Run it as what each node runs. In turn rank 0's main thread waits, is busy in C without the interpreter lock,
and is busy in Python; the others' wait. Each rank prints the medians of its rounds as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from harness.arguments import amount, number
from workers.blocking import Script


def main() -> None:
    """Measure this rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("size", type=amount, metavar="SIZE", help="of 32 keys together")
    parser.add_argument("rounds", type=number, metavar="N", help="of each kind")
    options = parser.parse_args()
    script = Script("dist_sync_netstorm", size=options.size, keys=32, optimizer="sgd")
    measured_here = script.store.rank == 0
    rounds: dict[str, list[float]] = {"nothing": [], "native": [], "python": []}
    script.round("nothing")  # warm up
    for turn in range(options.rounds):
        if measured_here:
            print(f"turn {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for beside, taken in rounds.items():
            script.store._barrier()  # noqa: SLF001 -- MXNet's name
            answer = script.round(beside if measured_here else "nothing")
            taken.append(answer["finish"] - answer["start"])
    found = {beside: round(statistics.median(taken), 4) for beside, taken in rounds.items()}
    print(json.dumps({"rank": script.store.rank, "size": options.size, "median_s": found}), flush=True)


if __name__ == "__main__":
    main()
