"""Jobs of real processes with PyTorch, for tests: ranks that are forked, run a program and can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.forking import DEADLINE_S, Forker
from tests.integration.jobs import Ended


class Ranks:
    """The ranks of a job. A context manager: nothing survives it."""

    def __init__(self, forker: Forker, folder: Path) -> None:
        self._forker = forker
        self.folder = folder
        self.pids: list[int] = []

    def start(self, program: Callable[..., Any], count: int, /, **arguments: Any) -> None:
        """Have each of `count` ranks call `program`, with the environment of torchrun.

        Settings of NetStorm and PyTorch may be given as arguments, in capitals.
        """
        settings = {name: str(value) for name, value in arguments.items() if name.isupper()}
        environments = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "STORE": f"file://{self.folder}/store",
                **settings,
            }
            for rank in range(count)
        ]
        for rank, environment in enumerate(environments):
            files = {name: f"{self.folder}/{name}{rank}" for name in ("out", "err", "answer")}
            pid = self._forker.fork(
                program=f"{program.__module__}:{program.__qualname__}",
                arguments={name: value for name, value in arguments.items() if not name.isupper()},
                environment=environment,
                **files,
            )
            self.pids.append(pid)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        os.kill(self.pids[rank], number)

    def said(self, rank: int) -> str:
        """Return what a rank has written so far."""
        texts = [self.folder / f"{name}{rank}" for name in ("out", "err")]
        return "".join(text.read_text(errors="replace") for text in texts if text.exists())

    def wait_until_said(self, rank: int, text: str) -> None:
        """Wait until a rank has written `text`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            has_ended = self._forker.exit_code(self.pids[rank]) is not None  # it may write, and end, now
            if text in self.said(rank):
                return
            assert not has_ended, f"rank {rank} ended: {self.said(rank)}"
            assert time.monotonic() < deadline, f"rank {rank} never said {text!r}: {self.said(rank)}"
            time.sleep(0.02)

    def end(self, rank: int) -> Ended:
        """Wait for a rank's end."""
        deadline = time.monotonic() + DEADLINE_S
        while (code := self._forker.exit_code(self.pids[rank])) is None:
            assert time.monotonic() < deadline, "ranks do not end; they said:\n" + "\n".join(
                f"{each}: {self.said(each)}" for each in range(len(self.pids))
            )
            time.sleep(0.02)
        out, err = ((self.folder / f"{name}{rank}").read_text(errors="replace") for name in ("out", "err"))
        return Ended(code, out, err)

    def answers(self) -> list[Any]:
        """Wait for all ranks, which must end well, and return what the program returned, by rank."""
        ended = [self.end(rank) for rank in range(len(self.pids))]
        failed = [f"rank {rank} ({one.code}):\n{one.text}" for rank, one in enumerate(ended) if one.code]
        assert not failed, "\n".join(failed)
        return [json.loads((self.folder / f"answer{rank}").read_text()) for rank in range(len(self.pids))]

    def answer(self, rank: int) -> Any:
        """Wait for a rank's end, and return what its program returned, though its job may have failed."""
        text = self.end(rank).text
        path = self.folder / f"answer{rank}"
        assert path.exists(), text
        return json.loads(path.read_text())

    def __enter__(self) -> Ranks:  # noqa: PYI034 -- Self is Python 3.11's
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.pids:
            if self._forker.exit_code(pid) is None:
                with contextlib.suppress(ProcessLookupError):  # its whole group: rank 0 may have a scheduler
                    os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while any(self._forker.exit_code(pid) is None for pid in self.pids):
            assert time.monotonic() < deadline, "ranks survive SIGKILL"
            time.sleep(0.02)


def on_ranks(count: int, /, *, fails: bool = False, **arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of what each of `count` ranks does. It passes if that raises nothing at any of them.

    Args:
        count: of ranks.
        fails: the job does, so that processes end with an error.
        arguments: of `Ranks.start`; a parameter `folder` gets the test's.
    """

    def test_of(program: Callable[..., Any]) -> Any:
        def test(ranks: Ranks) -> None:
            folder = {"folder": str(ranks.folder)} if "folder" in program.__annotations__ else {}
            ranks.start(program, count, **arguments, **folder)
            ended = [ranks.end(rank) for rank in range(count)]
            said = "\n".join(f"rank {rank} ({one.code}):\n{one.text}" for rank, one in enumerate(ended))
            assert [bool(one.code) for one in ended] == [fails] * count, said
            assert len(list(ranks.folder.glob("answer*"))) == count, said

        given: Any = test
        given.__name__, given.__doc__, given.program = program.__name__, program.__doc__, program
        return given

    return test_of
