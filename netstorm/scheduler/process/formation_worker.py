"""`python -m netstorm.scheduler.process.formation_worker`: forms the policies that its parent requests.

Requests come on standard input, results leave on what was standard output. Nothing else may be written
there, so everything that is printed goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from netstorm.scheduler.policies import FormationRequest, FormationResult
from netstorm.scheduler.policy_former import form
from netstorm.scheduler.process.formation_client import LENGTH, read_exactly

__all__ = ["main"]

_log = logging.getLogger(__name__)

_NICE: Final = 5
"""Training on the scheduler's host gets three times as much processor time. The lowest priority would be
too low: with all processors busy, a policy of nine nodes took up to 20 s instead of 0.3 s.
"""

_GROUP: Final = Path("/proc/self/autogroup")
"""Where the kernel groups processes by session, the nice value of the group counts (sched(7)). This process
has a session of its own.
"""


_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    if _has_no_parent():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its parent, which may leave it to the ranks
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        _GROUP.write_text(str(_NICE))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decoder = msgspec.msgpack.Decoder(FormationRequest)
    while True:
        try:
            (size,) = LENGTH.unpack(read_exactly(sys.stdin.buffer, LENGTH.size))
            request = decoder.decode(read_exactly(sys.stdin.buffer, size))
            answer = msgspec.msgpack.encode(_formed(request))
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()
        except (EOFError, BrokenPipeError):  # the scheduler is gone
            return


def _has_no_parent() -> bool:
    """Have Linux end this process with the scheduler's thread that has started it, which may be killed in the
    middle of a formation; return whether it has ended already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    requests = select.poll()
    requests.register(sys.stdin.fileno(), 0)  # that its other end is closed is always told
    return bool(requests.poll(0))


def _formed(request: FormationRequest) -> FormationResult:
    try:
        return form(request)
    except Exception as error:  # noqa: BLE001 -- the next request may succeed
        _log.exception("while forming a policy")
        return FormationResult(number=request.number, problem=f"forming failed: {error!r}")


if __name__ == "__main__":
    main()
