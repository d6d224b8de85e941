"""`python -m netstorm.scheduler.process.formation_worker`: forms the policies that its parent asks for.

Questions come on standard input, answers leave on what was standard output; nothing else is to be written
there, so what prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.policies.policy_former import form
from netstorm.scheduler.process.formation_client import LENGTH, read_exactly

__all__ = ["main"]

_log = logging.getLogger(__name__)

_NICE: Final = 5
"""Training on the scheduler's host goes first, three to one. At the lowest priority, where all processors are
busy, a policy of nine nodes took up to 20 s instead of .3, and its links had changed again meanwhile.
"""

_GROUP: Final = Path("/proc/self/autogroup")
"""Where the kernel has it, a session gets its share of the processors whatever the nice values in it are
(sched(7)); this process has a session of its own.
"""


def main() -> None:
    """Answer questions."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        _GROUP.write_text(str(_NICE))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decoder = msgspec.msgpack.Decoder(FormationRequest)
    while True:
        try:
            (size,) = LENGTH.unpack(read_exactly(sys.stdin.buffer, LENGTH.size))
            question = decoder.decode(read_exactly(sys.stdin.buffer, size))
            answer = msgspec.msgpack.encode(_formed(question))
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()
        except (EOFError, BrokenPipeError):  # the scheduler is gone
            return


def _formed(question: FormationRequest) -> FormationResult:
    try:
        return form(question)
    except Exception as error:  # noqa: BLE001 -- the next question may do
        _log.exception("while forming a policy")
        return FormationResult(number=question.number, problem=f"forming failed: {error!r}")


if __name__ == "__main__":
    main()
