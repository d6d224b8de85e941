"""Programs in processes of their own: for what may hang or crash, and for what happens at a process's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.jobs import PYTHONPATH

PROLOGUE = """
import os, queue, signal, socket, sys, threading, time, types
import numpy as np
import netstorm.frontends
# The engine layer alone: importing the package proper also brings the store, with its hooks at fork and exit.
bare = types.ModuleType("netstorm.frontends.mxnet")
bare.__path__ = [netstorm.frontends.__path__[0] + "/mxnet"]
sys.modules[bare.__name__] = bare
from netstorm.errors import NodeLost
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet import engine
from netstorm.frontends.mxnet.engine import push_async
from netstorm.frontends.mxnet.arrays import StagingBuffer
MXNetError = mx.base.MXNetError

def show(*words):
    print(*words, flush=True)

def started(reads=(), writes=()):
    '''Push an operation and return its completion once the engine has started it.'''
    completions = queue.SimpleQueue()
    push_async(completions.put, reads=reads, writes=writes, name="test")
    return completions.get(timeout=20)
"""


class Script:
    """A running program; its output is read while it runs, and `kill` ends it if it has not ended."""

    def __init__(self, source: str, folder: Path, **environment: str) -> None:
        self._out = folder / "stdout"
        self._err = folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-c", source],
                env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def wait_for(self, word: str, timeout_s: float = 60.0) -> None:
        """Wait until the program has printed a line with `word`."""
        deadline = time.monotonic() + timeout_s
        while word not in self.output:
            assert self._process.poll() is None, f"ended without {word!r}:\n{self.output}\n{self.errors}"
            assert time.monotonic() < deadline, f"no {word!r} in {timeout_s} s:\n{self.output}\n{self.errors}"
            time.sleep(0.01)

    def is_stuck(self, after: str, for_s: float = 1.5) -> bool:
        """Return whether the program is still there `for_s` after it has printed `after`."""
        self.wait_for(after)
        try:
            self._process.wait(for_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the program's end and return its exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended after {timeout_s} s:\n{self.output}\n{self.errors}") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
