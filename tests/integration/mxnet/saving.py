"""A job that saves checkpoints and is killed, or goes on from them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.integration.jobs import Job

END = """
if os.environ["SAVES"] == "1":
    print("to be killed", flush=True)
    signal.pause()
"""
"""How its scripts end."""


def run_saving(folder: Path, nodes: int, script: str, *, saves: bool, **variables: object) -> list[list[Any]]:
    """Run a job to its end, which is SIGKILL if it saves; return the lines of JSON of each rank.

    Scripts find in `SAVES` whether they save, and in `SAVED_IN` where.
    """
    folder.mkdir()
    own = {"SAVED_IN": folder.parent / "checkpoints", "SAVES": int(saves)}
    with Job(folder, nodes, **own, **variables) as job:
        for rank in range(nodes):
            job.start(rank, script + END)
        if saves:
            for rank in range(nodes):
                job.wait_until_said(rank, "to be killed")
            for rank in range(nodes):
                job.send(rank, signal.SIGKILL)
        ended = [job.end(rank) for rank in range(nodes)]
        assert [one.code for one in ended] == [-signal.SIGKILL if saves else 0] * nodes, ended[0].text
    return [[json.loads(line) for line in one.out.splitlines() if line.startswith("{")] for one in ended]
