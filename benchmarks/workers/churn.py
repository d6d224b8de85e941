"""One node of `netstorm bench churn`: sums whole numbers for ever, and checks every element of every sum.

Each step is a round of each key. A node's state is what all its sums so far make together, so one wrong,
lost or doubled sum anywhere shows in every later state. A node that comes later fetches it from the others.
Lines go to standard output: what became of each step, or of this process; commands come from standard input.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import importlib
import os
import queue
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from harness.churn_work import Numbers, Work, WrongSum, say, weight_of
from harness.lifeline import commands_from_stdin
from netstorm.errors import NetStormError, NodeRemoved
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.observe.log import configure_logging
from netstorm.protocol.frames import checksum, ranks_in
from netstorm.settings import Settings

REMOVED: Final = 3
"""Exit code of a node that has heard that it is out of the job."""

_LONGEST_S: Final = 120.0
"""For a step or a fetch; a hang is found by the parent sooner."""


class Worker:
    """The program of one node."""

    def __init__(self, runtime: Runtime, commands: queue.SimpleQueue[str | None]) -> None:
        namespace = runtime.open_namespace()
        self._work: Final = Work(runtime.rank)
        self._runtime: Final = runtime
        self._commands: Final = commands
        self._keys: Final = {
            name: runtime.register(namespace, name, (size,), "int64")
            for name, size in self._work.sizes.items()
        }

    def run(self) -> None:
        """Take steps until one in which a rank asks for the end."""
        if self._runtime.node.needs_state:
            self._fetch()
        say(event="begins", step=self._work.step)
        while not self._take_step():
            pass
        self._offer(last=True)
        self._runtime.finish()

    # ------------------------------------------------------------------------------------------------- steps

    def _take_step(self) -> bool:
        self._obey()
        if self._runtime.node.live.has_newcomers:
            self._offer(last=False)
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        operations = []
        for name, key in self._keys.items():
            operations.append(
                Operation(
                    key=key,
                    round=key.take_round(),
                    source=self._work.contribution(name),
                    destination=np.empty(key.elements, np.int64),
                    done=ended.put,
                )
            )
            self._runtime.submit(operations[-1])
        for _ in operations:
            error = ended.get(timeout=_LONGEST_S)
            if error is not None:
                raise error
        contributors = -1
        results: dict[str, Numbers] = {}
        for name, operation in zip(self._keys, operations, strict=True):
            contributors &= self._check(name, operation)
            assert operation.destination is not None
            results[name] = operation.destination
        return self._work.complete(results, contributors)

    def _check(self, name: str, operation: Operation) -> int:
        """Check each chunk against the contributors that it names; return those that are in all."""
        key, found = operation.key, operation.destination
        assert key.layout is not None
        assert found is not None
        in_all, named = -1, 0
        for ranks, chunks in operation.contributors.items():
            weight = weight_of(ranks_in(ranks))
            for chunk in ranks_in(chunks):
                begin, end = key.layout.bounds[chunk]
                named += end - begin
                self._work.check(name, found, weight, slice(begin, end), operation)
            in_all &= ranks
        if named != key.elements:
            raise WrongSum(f"{operation}: contributors of {named} of {key.elements} elements are named")
        return in_all

    def _obey(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if command in ("end", None):
                self._work.ends = True
            elif command == "cut":
                cut_a_connection()

    # ------------------------------------------------------------------------------------------------- state

    def _fetch(self) -> None:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()

        def done(error: Exception | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._runtime.post(lambda node, now: node.fetch_state(self._take, done, now))
        future.result(timeout=_LONGEST_S)

    def _take(self, snapshot: StateSnapshot) -> None:
        values = msgspec.msgpack.decode(bytes(snapshot.content), type=dict[str, bytes])
        self._work.step = snapshot.step
        for name, key in self._keys.items():
            self._work.state[name][:] = np.frombuffer(values[name], np.int64)
            key.begin_at(snapshot.step)

    def _offer(self, *, last: bool) -> None:
        content = msgspec.msgpack.encode({name: state.tobytes() for name, state in self._work.state.items()})
        keys: list[Key] = [key for key in self._keys.values() if key.identity >= 0]
        snapshot = StateSnapshot(
            step=self._work.step,
            content=content,
            crc=checksum(content),
            rounds={key.identity: self._work.step for key in keys},
            requests=None if last else self._runtime.node.live.state_requests,
        )
        self._runtime.post(lambda node, now: node.offer_state(snapshot, now))


def cut_a_connection() -> None:
    """Shut one of this process's TCP connections down, as a network that fails does."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        try:
            connected = connection.type is socket.SOCK_STREAM and connection.family is socket.AF_INET
            connection.getpeername()
        except OSError:
            connected = False
        if connected:
            found.append(connection)
        else:
            connection.close()
    if found:
        random.choice(found).shutdown(socket.SHUT_RDWR)
    for connection in found:
        connection.close()


def main() -> int:
    """Run, and return the exit code."""
    faulthandler.register(signal.SIGUSR1)
    commands = commands_from_stdin()
    for name in os.environ.get("BENCHMARK_IMPORTS", "").split():
        importlib.import_module(name)
    settings = Settings.from_environment()
    configure_logging(settings)
    runtime: Runtime | None = None
    try:
        runtime = Runtime(settings)
        say(event="joined", rank=runtime.rank)
        Worker(runtime, commands).run()
    except NodeRemoved as error:
        say(event="removed", text=str(error))
        return REMOVED
    except (NetStormError, WrongSum, queue.Empty, concurrent.futures.TimeoutError) as error:
        say(event="error", text=f"{type(error).__name__}: {error}")
        return 1
    finally:
        if runtime is not None:
            runtime.close()
    say(event="ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
