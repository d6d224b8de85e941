"""The child's side of `harness.child`: commands in, answers out, and an end with the parent."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from harness.lifeline import commands_from_stdin

__all__ = ["Answer", "serve"]

Answer = dict[str, Any]


def serve(join: Callable[[], tuple[Answer, Callable[[Answer], Answer]]]) -> None:
    """Serve until standard input is closed.

    Args:
        join: gets ready; returns the first answer, and what answers each command.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    commands = commands_from_stdin()

    def answer(values: Answer) -> None:
        print(json.dumps(values), file=answers)

    try:
        first, answer_to = join()
        answer(first)
        while (line := commands.get()) is not None:
            answer(answer_to(json.loads(line)))
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
