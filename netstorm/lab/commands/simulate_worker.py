"""The worker process of `netstorm simulate`, and its messages: a case, and the answers about it."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from netstorm import clock
from netstorm.dashboard.recording import StatusRecorder
from netstorm.errors import NetStormError, UsageError
from netstorm.lab.simulation.experiment import Engine, Experiment, run
from netstorm.topology.network import Network

__all__ = [
    "OPTIMUM",
    "Answer",
    "Case",
    "CaseBegun",
    "CaseEnded",
    "CaseFailed",
    "Formed",
    "Generated",
    "RoundDone",
    "Stored",
    "main",
    "run_case",
]


# Messages between `netstorm simulate` and its worker process: a case, and the answers about it.

OPTIMUM = "the optimum"
"""In place of a scheme's name: the optimum, which no scheme can beat."""


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    """A random network."""

    family: str
    nodes: int
    seed: int


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A network file."""

    path: str


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One scheme on one network. Sizes in bytes."""

    network: Generated | Stored
    topology: str
    degree: int = 2
    tensors: tuple[int, ...]
    chunk_bytes: int
    rounds: int
    seed: int
    engine: str
    record: str = ""
    """File that gets the statuses of the job; empty: none."""


class CaseBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The network is loaded; the time limit of the case begins."""


class Formed(msgspec.Struct, frozen=True, kw_only=True, tag="formed"):
    """The policy is formed."""

    formation_s: float
    reason: str


class RoundDone(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """A round has ended. Seconds are virtual."""

    seconds: float


class CaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The case is done."""

    optimum_s: float | None = None
    """If the case is the optimum."""
    bound_s: float | None = None
    """Likewise: the time that no round takes less than."""
    certificate: str = ""
    """That bound, and why, in words, on several lines."""


class CaseFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The case has failed."""

    message: str
    unfit: bool
    """The scheme does not apply to this network; if not, the case failed because of an error."""


Answer: TypeAlias = CaseBegun | Formed | RoundDone | CaseEnded | CaseFailed


# The worker process of `netstorm simulate`: forms and simulates one case after the other.
#
# It is a process because it can be killed when a case takes too long, even inside a linear program; a thread
# cannot. Cases and answers are lines of JSON. The process ends at the end of its input, even during a case.

_GONE: Final = 1
_RECORDED_BYTES: Final = 256_000_000
"""Then the recording has larger steps, as that of `netstorm record`."""


def main() -> None:
    """Run cases until the process is killed, or its input ends."""
    cases: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(cases,), daemon=True).start()
    while True:
        case = msgspec.json.decode(cases.get(), type=Case)
        run_case(case, _write)


def _listen(cases: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        cases.put(line)
    os._exit(_GONE)


def _write(answer: Answer) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def run_case(case: Case, report: Callable[[Answer], None]) -> None:
    """Run one case, and report on it; the last report is `Ended` or `Failed`."""
    try:
        network = _network(case.network)
    except UsageError as error:
        report(CaseFailed(message=_line(error), unfit=True))
        return
    report(CaseBegun())
    try:
        if case.topology == OPTIMUM:
            from netstorm.topology.lower_bound import PART_HEADER_BYTES, lower_bound
            from netstorm.topology.resources import optimum

            best = optimum(network, sum(case.tensors))
            bound = lower_bound(
                network,
                best,
                case.tensors,
                chunk_bytes=case.chunk_bytes,
                header_bytes=PART_HEADER_BYTES,
            )
            report(CaseEnded(optimum_s=best.seconds, bound_s=bound.seconds, certificate=bound.text()))
        else:
            _simulate(case, network, report)
            report(CaseEnded())
    except UsageError as error:
        report(CaseFailed(message=_line(error), unfit=True))
    except (NetStormError, AssertionError, ArithmeticError, ValueError, MemoryError) as error:
        report(CaseFailed(message=_line(error), unfit=False))


def _simulate(case: Case, network: Network, report: Callable[[Answer], None]) -> None:
    from netstorm.topology.form import form_policy

    began = clock.monotonic()
    policy = form_policy(
        network.at(0.0),
        case.topology,
        tensors=case.tensors,
        chunk_bytes=case.chunk_bytes,
        degree=case.degree,
        seed=case.seed,
    )
    report(Formed(formation_s=clock.monotonic() - began, reason=policy.reason))
    experiment = Experiment(
        tensors=case.tensors, chunk_bytes=case.chunk_bytes, rounds=case.rounds, seed=case.seed
    )
    with contextlib.ExitStack() as stack:
        on_status = None
        if case.record:
            recorder = StatusRecorder(Path(case.record), _RECORDED_BYTES)
            stack.callback(recorder.close)
            on_status = recorder.add
        run(
            Engine(case.engine),
            network,
            policy,
            experiment,
            lambda seconds: report(RoundDone(seconds=seconds)),
            on_status=on_status,
        )


@lru_cache(maxsize=1)  # all schemes of a seed come one after the other
def _network(source: Generated | Stored) -> Network:
    if isinstance(source, Stored):
        from netstorm.topology.files import load_network

        return load_network(source.path)
    from netstorm.topology.network import generate

    return generate(source.family, source.nodes, source.seed)


def _line(error: Exception) -> str:
    """Return the first line of an error; the rest is for debugging."""
    return str(error).partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    main()
