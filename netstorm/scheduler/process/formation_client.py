"""Has policies formed in a process of its own, so that the scheduler's answers never wait for it.

The process is started when it is first needed (SciPy takes a second to load) and kept. One that dies, or
takes longer than it may, is logged, and started anew for the next question. Both sides speak MessagePack
through pipes; the thread here only waits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Final

import msgspec

from netstorm import clock
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.settings import child_environment

__all__ = ["COMMAND", "LENGTH", "Former", "read_exactly"]

_log = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "netstorm.scheduler.process.formation_worker")

LENGTH: Final = struct.Struct("<I")
"""Before each message: its bytes."""

_DECODER: Final = msgspec.msgpack.Decoder(FormationResult)


class Former:
    """Forms policies, one at a time. It must be closed.

    Attributes:
        deliver: called with each answer, on the former's own thread; to be set before the first question.
    """

    def __init__(self, *, limit_s: float | None = None, command: Sequence[str] = COMMAND) -> None:
        """Start nothing yet.

        Args:
            limit_s: how long a formation may take; None: a minute and what large jobs need (512 nodes: 86 s
                for the trees).
            command: what forms.
        """
        self.deliver: Callable[[FormationResult], None] = lambda _: None
        self._limit_s: Final = limit_s
        self._command: Final = tuple(command)
        self._questions: Final[queue.SimpleQueue[FormationRequest | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: Final = threading.Lock()
        self._closed = False

    def ask(self, question: FormationRequest) -> None:
        """Have something formed; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="netstorm-former", daemon=True)
            self._thread.start()
        self._questions.put(question)

    def close(self) -> None:
        """Kill the process, whatever it does. Twice does no harm."""
        with self._lock:
            self._closed = True
            self._kill()
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join()

    # --------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            began = clock.monotonic()
            answer = self._answer(question)
            if answer is not None:
                self.deliver(msgspec.structs.replace(answer, took_s=clock.monotonic() - began))
        if self._process is not None:
            _reap(self._process)

    def _answer(self, question: FormationRequest) -> FormationResult | None:
        """Return what came of a question; None: closed meanwhile."""
        process = self._running()
        if process is None:
            return None
        limit_s = 60.0 + len(question.nodes) ** 2 / 1000 if self._limit_s is None else self._limit_s
        timer = threading.Timer(limit_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            body = msgspec.msgpack.encode(question)
            process.stdin.write(LENGTH.pack(len(body)) + body)
            process.stdin.flush()
            (size,) = LENGTH.unpack(read_exactly(process.stdout, LENGTH.size))
            return _DECODER.decode(read_exactly(process.stdout, size))
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            return self._broken(question, process, error, late_s=limit_s * timer.finished.is_set())
        finally:
            timer.cancel()
            timer.join()

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                self._process = subprocess.Popen(  # noqa: S603 -- our own command
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the scheduler, which then kills this process
                    env=child_environment(OMP_NUM_THREADS=1, OPENBLAS_NUM_THREADS=1),
                )
            return self._process

    def _broken(
        self, question: FormationRequest, process: subprocess.Popen[bytes], error: Exception, *, late_s: float
    ) -> FormationResult | None:
        with self._lock:
            self._kill()
            self._process = None
        _reap(process)
        if self._closed:
            return None
        problem = (
            f"forming took longer than {late_s:g} s, and was broken off"
            if late_s
            else f"the process that forms policies has ended (exit code {process.returncode}): {error!r}"
        )
        _log.warning("%s; the next policy is formed by a new one", problem)
        return FormationResult(number=question.number, problem=problem)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Return `size` bytes.

    Raises:
        EOFError: the stream has ended before.
    """
    data = stream.read(size)
    if len(data) < size:
        raise EOFError(f"{len(data)} of {size} bytes")
    return data


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
