"""Programs in processes of their own: for what may hang or crash, and for what happens at a process's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.forking import ForkedProcess, Forker
from tests.integration.jobs import PYTHONPATH

PROLOGUE = """
import os, queue, signal, socket, sys, threading, time
import numpy as np
import netstorm.frontends.mxnet
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
    return completions.get(timeout=60)
"""


class Script:
    """A running program; its output is read while it runs, and `kill` ends it if it has not ended."""

    def __init__(self, source: str, folder: Path, forker: Forker | None, **environment: str) -> None:
        """Fork it, or start an interpreter: MXNet reads variables of its environment when it is imported."""
        files = {"out": folder / "stdout", "err": folder / "stderr"}
        variables = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
        script = folder / "script.py"
        script.write_text(source)
        for file in files.values():
            file.touch()
        self._files = files
        self._process: ForkedProcess | subprocess.Popen[bytes]
        if forker is not None:
            to = {name: str(file) for name, file in files.items()}
            self._process = ForkedProcess(forker, words=[str(script)], environment=variables, **to)
        else:
            with files["out"].open("w") as out, files["err"].open("w") as err:
                self._process = subprocess.Popen(
                    [sys.executable, str(script)],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )

    @property
    def output(self) -> str:
        return self._files["out"].read_text()

    @property
    def errors(self) -> str:
        return self._files["err"].read_text()

    def wait_for(self, word: str, timeout_s: float = 60.0) -> None:
        """Wait until the program has printed a line with `word`."""
        deadline = time.monotonic() + timeout_s
        while word not in self.output:
            assert self._process.poll() is None, f"ended without {word!r}:\n{self.output}\n{self.errors}"
            assert time.monotonic() < deadline, f"no {word!r} in {timeout_s} s:\n{self.output}\n{self.errors}"
            time.sleep(0.01)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 90.0) -> int:
        """Wait for the program's end and return its exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended after {timeout_s} s:\n{self.output}\n{self.errors}") from None

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
