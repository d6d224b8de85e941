"""A real scheduler process, and nodes that do as they are told over the real van."""

from __future__ import annotations

import math
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import netstorm
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer
from netstorm.pslite.io_thread import start_driver
from netstorm.pslite.machine import Admission, Become, Connect, Disconnect, Instruction, Refuse, Send
from netstorm.settings import Settings
from tests.integration.forking import ForkedProcess
from tests.integration.jobs import Job

if TYPE_CHECKING:
    from typing_extensions import Self

M = TypeVar("M", bound=m.Message)

LIMIT_S = 60.0
"""For anything that should take a second: the machine may be busy."""


class Script:
    """A machine that joins, sends heartbeats and whatever it is told to, and keeps what it hears."""

    def __init__(self, join: m.Join, port: int, heartbeat_s: float, now: float) -> None:
        self.heard: queue.Queue[m.Message] = queue.Queue()
        self.heartbeat_s = heartbeat_s
        self.lost = ""
        self._beat_at = now
        self._instructions: list[Instruction] = [
            Connect(peer=SCHEDULER, host="127.0.0.1", port=port),
            Send(peer=SCHEDULER, message=join),
        ]

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        return Refuse("a script")

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        if isinstance(message, m.Joined):
            self._instructions.append(Become(rank=message.rank))
        self.heard.put(message)

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        self.lost = reason

    def tick(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + self.heartbeat_s
            self._instructions.append(Send(peer=SCHEDULER, message=m.Heartbeat()))

    def next_tick(self) -> float:
        return self._beat_at

    def abort(self, error: Exception, now: float) -> None:
        self._beat_at = math.inf

    def take_instructions(self) -> list[Instruction]:
        taken, self._instructions = self._instructions, []
        return taken

    def say(self, message: m.Message) -> None:
        self._instructions.append(Send(peer=SCHEDULER, message=message))

    def leave(self) -> None:
        self._beat_at = math.inf
        self._instructions += [Send(peer=SCHEDULER, message=m.Leave()), Disconnect(peer=SCHEDULER)]


class ScriptedNode:
    """A script on real sockets. Leaving its `with` block closes them without a word, as a crash does."""

    def __init__(
        self,
        port: int,
        rank: int = -1,
        *,
        num_workers: int = 2,
        job: str = "default",
        heartbeat_s: float = 0.2,
    ) -> None:
        join = m.Join(
            asked_rank=rank,
            num_workers=num_workers,
            host="127.0.0.1",
            port=0,
            site=f"site{rank}",
            release=netstorm.__version__,
            pid=os.getpid(),
        )

        def make(own_port: int) -> Script:
            values = {name: getattr(join, name) for name in join.__struct_fields__}
            return Script(m.Join(**{**values, "port": own_port}), port, heartbeat_s, time.monotonic())

        self._driver = start_driver(
            make,
            settings=Settings(num_workers=num_workers, job=job, link_timeout_s=5.0),
            counters=Counters(),
            bind_host="127.0.0.1",
            port=0,
            rank=-1,
            ordered=lambda _: True,
            stamp=time.time_ns,
            name=f"script-{rank}",
        )
        self.port = self._driver.port
        self.thread = self._driver.thread
        self._script = self._driver.machine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.thread.close(linger_s=0.0)

    def say(self, message: m.Message) -> None:
        self._driver.thread.call(lambda _: self._script.say(message)).result(LIMIT_S)

    def leave(self) -> None:
        """Leave in good order: the last word is acknowledged before the sockets close."""
        self._driver.thread.call(lambda _: self._script.leave()).result(LIMIT_S)
        self._driver.thread.close(linger_s=LIMIT_S)

    def hears(self, kind: type[M]) -> M:
        """Wait for a message of one kind; what comes before it is dropped."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            message = self._script.heard.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message

    def lost(self) -> str:
        """Wait until the scheduler does not talk to this node any more; return why."""
        wait_for(lambda: bool(self._script.lost), "the end of the session")
        return self._script.lost


class SchedulerProcess:
    """`netstorm scheduler` as a user starts it, on a free port."""

    def __init__(self, folder: Path, *arguments: str, num_workers: int = 2, **variables: str) -> None:
        self.ready_file = folder / "ready"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NETSTORM_")}
        output = folder / "output"
        output.touch()
        self._output = output.open()
        assert Job.forker is not None
        self._process = ForkedProcess(
            Job.forker,
            words=[
                *("netstorm", "scheduler", "--port", "0"),
                *("--num-workers", str(num_workers), "--ready-file", str(self.ready_file), *arguments),
            ],
            environment={**environment, **variables},
            out=str(output),
            err=str(output),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._output.close()

    @property
    def port(self) -> int:
        """The port, once it listens."""
        wait_for(lambda: self.ready_file.exists() or self._process.poll() is not None, "the ready file")
        return int(self.ready_file.read_text().rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(LIMIT_S)

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def says(self, text: str) -> None:
        """Wait until it has printed something."""
        wait_for(lambda: text in self.output(), f"{text!r} in:\n{self.output()}")


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no sign of {what}"
        time.sleep(0.02)
