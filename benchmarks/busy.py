"""What it costs rounds that one rank's main thread is busy meanwhile, on a network that sets their pace.

    netstorm launch -n 2 --wan examples/networks/pair.yaml -- python benchmarks/busy.py 16MB 10

Run it as what each node runs; `--framework torch` has PyTorch's all-reduces instead of MXNet's calls. In turn
rank 0's main thread waits, is busy in C without the interpreter lock, and is busy in Python; the others wait.
Each rank prints the medians of its rounds as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Protocol

from harness.arguments import amount, number
from harness.serving import Answer

_KEYS = 32


class Script(Protocol):
    """A training script of one framework."""

    @property
    def rank(self) -> int:
        """This rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def round(self, beside: str) -> Answer:
        """Sum all gradients while the main thread does `beside`; return start and finish."""

    def close(self) -> None:
        """Leave the job."""


def main() -> None:
    """Measure this rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("size", type=amount, metavar="SIZE", help=f"of {_KEYS} keys or tensors together")
    parser.add_argument("rounds", type=number, metavar="N", help="of each kind")
    parser.add_argument("--framework", choices=("mxnet", "torch"), default="mxnet", help="default mxnet")
    options = parser.parse_args()
    script = _script(options.framework, options.size)
    measured_here = script.rank == 0
    rounds: dict[str, list[float]] = {"nothing": [], "native": [], "python": []}
    script.round("nothing")  # warm up
    for turn in range(options.rounds):
        if measured_here:
            print(f"turn {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for beside, taken in rounds.items():
            script.barrier()
            answer = script.round(beside if measured_here else "nothing")
            taken.append(answer["finish"] - answer["start"])
    found = {beside: round(statistics.median(taken), 4) for beside, taken in rounds.items()}
    print(json.dumps({"rank": script.rank, "size": options.size, "median_s": found}), flush=True)
    script.close()


def _script(framework: str, size: int) -> Script:
    if framework == "torch":
        from workers.torch_script import TorchScript  # noqa: PLC0415 - one process needs one framework

        return TorchScript(size=size, keys=_KEYS)
    from workers.blocking import Script as MXNetScript  # noqa: PLC0415

    return MXNetScript("dist_sync_netstorm", size=size, keys=_KEYS, optimizer="sgd")


if __name__ == "__main__":
    main()
