"""One worker process of a benchmark; `loopback.py` starts it and speaks JSON lines with it.

Commands: prepare (write this round's addend), allreduce (answers with its start and end on the monotonic
clock, which the processes of one machine share), check (answers with an error if any element of the sum is
wrong).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from harness.lifeline import commands_from_stdin
from harness.pattern import fill, wrong_sum
from systems.alone import alone
from systems.base import Case, Node
from systems.registry import SYSTEMS


def main() -> None:
    """Serve until standard input is closed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    commands = commands_from_stdin()
    name, *numbers = sys.argv[1:]
    nodes, size, keys = map(int, numbers)
    case = Case(nodes=nodes, bytes=size, keys=keys)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers)

    try:
        node = alone(name, case) if name.startswith("without-") else SYSTEMS[name].join(case)
        answer(rank=node.rank)
        while (line := commands.get()) is not None:
            answer(**serve(node, json.loads(line)))
    except BaseException as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        raise


def serve(node: Node, command: dict[str, Any]) -> dict[str, Any]:
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
    main()
