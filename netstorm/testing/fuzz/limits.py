"""Bounds on what one input may cost. A decoder that takes longer, or more memory, has been found wanting."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Cost", "Costs", "Hang", "bounded_memory"]

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
