"""One worker process of `loopback.py` and `wan.py`.

Commands: prepare (write this round's addend), allreduce (answers with its start and end on the monotonic
clock, which the processes of one machine share), check (answers with an error if any element of the sum is
wrong).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

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
    return {"rank": node.rank}, lambda command: do(node, command)


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
        return {"error": wrong_sum(node, nodes=node.nodes, number=number)}
    raise ValueError(f"no command {command['do']!r}")


if __name__ == "__main__":
    serve(join)
