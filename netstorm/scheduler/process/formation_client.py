"""The client of the formation worker: policies are formed in a process of their own, so that the scheduler
never waits for them.

The worker is started for the first request (SciPy takes a second to load) and kept. If it dies or exceeds
the time limit, that is logged, and a new one is started for the next request. Messages go through pipes as
MessagePack; the thread here only waits.
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
from netstorm.scheduler.policies import FormationRequest, FormationResult
from netstorm.settings import child_environment

__all__ = ["COMMAND", "LENGTH", "FormationClient", "read_exactly"]

_log = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "netstorm.scheduler.process.formation_worker")

LENGTH: Final = struct.Struct("<I")
"""Stands before each message: how many bytes it has."""

_DECODER: Final = msgspec.msgpack.Decoder(FormationResult)


class FormationClient:
    """Forms policies, one at a time. It must be closed.

    Attributes:
        deliver: called with each result, on the client's own thread; set it before the first request.
    """

    def __init__(self, *, limit_s: float | None = None, command: Sequence[str] = COMMAND) -> None:
        """Start nothing yet.

        Args:
            limit_s: how long a formation may take. None: a minute, and more for large jobs (for 512 nodes the
                trees alone take 86 s).
            command: starts the worker.
        """
        self.deliver: Callable[[FormationResult], None] = lambda _: None
        self._limit_s: Final = limit_s
        self._command: Final = tuple(command)
        self._requests: Final[queue.SimpleQueue[FormationRequest | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: Final = threading.Lock()
        self._closed = False

    def submit(self, request: FormationRequest) -> None:
        """Request a formation; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="netstorm-formation", daemon=True)
            self._thread.start()
        self._requests.put(request)

    def close(self) -> None:
        """Kill the worker, even in the middle of a formation. Twice does no harm."""
        with self._lock:
            self._closed = True
            self._kill()
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()

    # --------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            began = clock.monotonic()
            answer = self._answer(request)
            if answer is not None:
                self.deliver(msgspec.structs.replace(answer, took_s=clock.monotonic() - began))
        if self._process is not None:
            _reap(self._process)

    def _answer(self, request: FormationRequest) -> FormationResult | None:
        """Return the result of a request; None: the client was closed."""
        process = self._running()
        if process is None:
            return None
        limit_s = 60.0 + len(request.nodes) ** 2 / 1000 if self._limit_s is None else self._limit_s
        timer = threading.Timer(limit_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            body = msgspec.msgpack.encode(request)
            process.stdin.write(LENGTH.pack(len(body)) + body)
            process.stdin.flush()
            (size,) = LENGTH.unpack(read_exactly(process.stdout, LENGTH.size))
            return _DECODER.decode(read_exactly(process.stdout, size))
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            return self._broken(request, process, error, late_s=limit_s * timer.finished.is_set())
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
        self, request: FormationRequest, process: subprocess.Popen[bytes], error: Exception, *, late_s: float
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
        return FormationResult(number=request.number, problem=problem)

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
