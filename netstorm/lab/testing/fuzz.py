"""Fuzzing: mutated inputs for decoders, guided by coverage, with bounds on time and memory."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from netstorm.lab.testing.mutation import FuzzTarget, Mutator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Cost",
    "Costs",
    "Finding",
    "FuzzTarget",
    "Fuzzer",
    "Mutator",
    "bounded_memory",
    "input_name",
    "load_corpus",
    "save_corpus",
]


# The loop: mutate an input, decode it, keep it if it has shown something new.
#
# Tracing every input would cost most of the time. So an input is traced only if it ended in a new way (where
# and with which words the error was raised, or what kind of input the target says it was), and one in a
# hundred of the others. It is kept if it has executed a line that no other has.

_TRACED: Final = 0.01
"""Part of the inputs that is traced although they ended as others did."""

_MOST_ENDS: Final = 20_000
_MOST_KEPT: Final = 1000
_VARIABLE: Final = re.compile(r"[0-9]+|'[^']*'|\"[^\"]*\"")
_MOST_FINDINGS: Final = 20
"""Of one target: more would be the same again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that a decoder does not withstand."""

    target: str
    data: bytes
    problem: str
    """What happened: an exception with its traceback, or a bound that was exceeded."""


class Fuzzer:
    """Fuzzes one target. Equal seeds and corpora make equal inputs.

    Attributes:
        inputs: decoded so far.
        findings: one for each place and kind of error.
        kept: inputs that have executed new lines, in order.
        lines: of NetStorm that were executed.
        slowest: processor seconds of the most expensive input.
    """

    def __init__(self, target: FuzzTarget, *, seed: int, corpus: Iterable[bytes] = ()) -> None:
        """Begin with the target's seeds and a corpus, which are decoded first."""
        self.target: Final = target
        self.inputs = 0
        self.findings: list[Finding] = []
        self.kept: list[bytes] = []
        self.lines: set[tuple[str, int]] = set()
        self.slowest = 0.0
        self._chance: Final = random.Random(f"{seed} {target.name}")
        self._waiting: Final = [*target.seeds(), *corpus]
        self._pool: list[bytes] = list(self._waiting)
        self._ends: set[Hashable] = set()
        self._found: set[Hashable] = set()

    def run(self, inputs: int, current: Callable[[bytes], None] | None = None) -> None:
        """Decode so many more inputs, those that it began with first.

        Args:
            inputs: how many.
            current: is called with each input before it is decoded: what ends the process can then be found.
        """
        with Costs() as costs:
            before = costs.now()
            for _ in range(inputs):
                if len(self.findings) >= _MOST_FINDINGS:
                    return
                data = self._next()
                if current is not None:
                    current(data)
                costs.watch()
                self._decode(data)
                after = costs.now()
                excess = costs.excess(before, after)
                if excess is not None:
                    self._find(data, excess.partition(" ")[0], excess)
                self.slowest = max(self.slowest, after[0] - before[0])
                before = after

    def replay(self, data: bytes) -> Finding | None:
        """Decode one input; return what is wrong, if anything is."""
        known = len(self.findings)
        self._waiting.insert(0, data)
        self.run(1)
        return self.findings[-1] if len(self.findings) > known else None

    def _next(self) -> bytes:
        if self._waiting:
            return self._waiting.pop(0)
        chance = self._chance
        pool = self._pool
        # The newest are mutated more often: what is behind a new line has been tried least.
        at = int(chance.random() ** 0.7 * len(pool))
        data = self.target.mutate(chance, pool[at], pool[int(chance.random() * len(pool))])
        return data[: self.target.largest]

    def _decode(self, data: bytes) -> None:
        self.inputs += 1
        end = self._end(data)
        if end is None:
            return
        if end not in self._ends and len(self._ends) < _MOST_ENDS:
            self._ends.add(end)
        elif self._chance.random() >= _TRACED:
            return
        self._trace(data)

    def _end(self, data: bytes) -> Hashable:
        """Decode; return how it ended, None if it is a finding."""
        target = self.target
        try:
            return target.decode(data)
        except target.allowed as error:
            place = []
            step = error.__traceback__
            while step is not None:
                place.append(step.tb_lineno)
                step = step.tb_next
            return type(error).__name__, *place, _VARIABLE.sub("", str(error)[:100])
        except (Exception, Hang) as error:  # noqa: BLE001 -- that is what is looked for
            self._find(data, _place_of(error), "".join(traceback.format_exception(error)))
            return None

    def _trace(self, data: bytes) -> None:
        known = len(self.lines)
        try:
            lines_of(lambda: self.target.decode(data), self.lines)
        except self.target.allowed:
            pass
        except (Exception, Hang) as error:  # noqa: BLE001 -- it ended otherwise before: depends on something else
            self._find(data, _place_of(error), "".join(traceback.format_exception(error)))
        if len(self.lines) > known:
            self.kept.append(data)
            if len(self._pool) >= _MOST_KEPT:
                self._pool.pop(int(self._chance.random() * len(self._pool)))
            self._pool.append(data)

    def _find(self, data: bytes, place: Hashable, problem: str) -> None:
        if place not in self._found:
            self._found.add(place)
            self.findings.append(Finding(self.target.name, data, problem))


def _place_of(error: BaseException) -> Hashable:
    """Return where an error was raised, and its class: errors of one place are one finding."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, frame.filename, frame.lineno


# Which lines of NetStorm a call executes. Tracing slows it down ten times, so few inputs are traced.

_PACKAGE: Final = str(Path(__file__).parents[2])
_OWN: Final = str(Path(__file__))


def lines_of(call: Callable[[], object], lines: set[tuple[str, int]]) -> None:
    """Add the lines that `call` executes to `lines`; what it raises is raised."""

    def of_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    def of_call(frame: FrameType, _event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return of_line if name.startswith(_PACKAGE) and not name.startswith(_OWN) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        call()
    finally:
        sys.settrace(before)


# Bounds on what one input may cost. A decoder that takes longer, or more memory, has been found wanting.

MOST_CPU_S: Final = 1.0
"""Processor time of one input of a few kilobytes."""

MOST_NEW_BYTES: Final = 96 * 2**20
"""By which one input may make the process larger than it ever was."""

_HANG_S: Final = 15.0

Cost = tuple[float, int]
"""Processor seconds so far, and the most bytes so far."""


class Hang(BaseException):
    """Raised in a decoder that does not return. No decoder catches it."""


class Costs:
    """Measures the cost of inputs. To be used in the main thread, in a `with` statement."""

    def __enter__(self) -> Self:
        self._before: object = signal.signal(signal.SIGVTALRM, _hangs)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, self._before)  # type: ignore[arg-type] # what signal() returned

    def watch(self) -> None:
        """Raise `Hang` unless this is called again soon, by the processor's clock."""
        signal.setitimer(signal.ITIMER_VIRTUAL, _HANG_S)

    @staticmethod
    def now() -> Cost:
        """Return what this process has cost."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024

    @staticmethod
    def excess(before: Cost, after: Cost) -> str | None:
        """Return what was too much between two costs, for a person; None: nothing."""
        if after[1] - before[1] > MOST_NEW_BYTES:  # first: taking it costs time, too
            grown = (after[1] - before[1]) / 2**20
            return f"took {grown:.0f} MiB of memory: expected at most {MOST_NEW_BYTES / 2**20:.0f} MiB"
        if after[0] - before[0] > MOST_CPU_S:
            return f"took {after[0] - before[0]:.1f} s of processor time: expected at most {MOST_CPU_S:g} s"
        return None


@contextlib.contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """Let the process have so many bytes of addresses: what allocates more has a `MemoryError`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _hangs(_number: int, _frame: object) -> None:
    raise Hang(f"still running after {_HANG_S:g} s of processor time")


# A corpus in a folder: one file an input, named by its content, in a folder for each target.


def input_name(data: bytes) -> str:
    """Return the name of an input's file: the same input has the same name everywhere."""
    return hashlib.sha256(data).hexdigest()[:16]


def load_corpus(folder: Path, target: str) -> list[bytes]:
    """Return the inputs of a target, in the order of their names; none if there is no such folder."""
    files = sorted((folder / target).glob("*")) if (folder / target).is_dir() else []
    return [path.read_bytes() for path in files if path.is_file()]


def save_corpus(folder: Path, target: str, inputs: Iterable[bytes]) -> None:
    """Write inputs that are not there yet."""
    place = folder / target
    place.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        path = place / input_name(data)
        if not path.exists():
            path.write_bytes(data)
