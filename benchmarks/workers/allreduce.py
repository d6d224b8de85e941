"""One worker process of `loopback.py` and `wan.py`.

Commands: prepare (write this round's addend), allreduce (answers with its start and end on the monotonic
clock, which the processes of one machine share), check (answers with an error if any element of the sum is
wrong).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.pattern import fill, wrong_sum
from harness.serving import Answer, serve
from systems.alone import alone
from systems.base import Case, Node
from systems.registry import SYSTEMS


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the group that the command line names."""
    name, nodes, size, keys, model = sys.argv[1:]
    case = Case(nodes=int(nodes), bytes=int(size), keys=int(keys), model=model)
    node = alone(name, case) if name.startswith("without-") else SYSTEMS[name].join(case)
    return {"rank": node.rank, "pids": _pids()}, lambda command: do(node, command)


def _pids() -> list[int]:
    """Return this process and those that a system has started for itself: all its work is theirs."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def do(node: Node, command: dict[str, Any]) -> Answer:
    """Do one command and return its answer."""
    number = command["round"]
    if command["do"] == "prepare":
        fill(node, rank=node.rank, number=number)
        node.settle()
        return {}
    if command["do"] == "allreduce":
        start = time.monotonic()
        node.allreduce()
        return {"start": start, "finish": time.monotonic()}
    if command["do"] == "check":
        tolerance = getattr(node, "tolerance", 0.0)
        return {"error": wrong_sum(node, nodes=node.nodes, number=number, tolerance=tolerance)}
    raise ValueError(f"no command {command['do']!r}")


if __name__ == "__main__":
    serve(join)
