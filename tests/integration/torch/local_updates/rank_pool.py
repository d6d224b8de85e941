"""Processes with PyTorch that serve as ranks, one program after the other: importing it takes seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

DEADLINE_S = 100  # ranks import PyTorch, which takes most of a minute on a busy machine

RANKS = 4
"""How many there are, unless a program asks for more."""


class RankFailed(Exception):
    """A program raised at a rank; the message is its traceback."""


class RankPool:
    """A context manager; its processes start when they are needed first."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def warm_up(self) -> None:
        """Start the processes now, so that no test seems to leave them behind."""
        self._start(RANKS)

    def run(self, program: Callable[..., Any], ranks: int, **arguments: Any) -> list[Any]:
        """Run `program` in a new process group and return what it returned at each rank."""
        self._start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            where = f"{program.__module__}:{program.__qualname__}"
            for rank, (_, pipe) in enumerate(self._workers[:ranks]):
                pipe.send((where, rank, ranks, f"{folder}/store", arguments))
            answers = [self._answer(rank) for rank in range(ranks)]
        failures = [text for failed, text in answers if failed]
        if failures:
            self._stop()  # their process group may be in any state
            self._start(RANKS)
            raise RankFailed("\n".join(failures))
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(DEADLINE_S):
                return pipe.recv()  # type: ignore[no-any-return]
            return True, f"rank {rank} has not answered within {DEADLINE_S} s"
        except EOFError:
            return True, f"rank {rank} has died with exit code {process.exitcode}"

    def _start(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join(DEADLINE_S)
            process.close()
        self._workers.clear()


def _serve(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            where, rank, ranks, store, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=DEADLINE_S / 2),
            )
            module, name = where.split(":")
            answer = getattr(importlib.import_module(module), name)(**arguments)
            dist.destroy_process_group()
            pipe.send((False, answer))
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
