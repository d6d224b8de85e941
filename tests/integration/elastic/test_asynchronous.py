"""Elastic jobs of real processes that train asynchronously with MXNet: owners die, and ranks join."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic.asynchronous_scripts import (
    ALONE,
    COUNTS,
    DIGITS,
    LATE_GRADIENT,
    PLACES,
    RESTARTED,
)
from tests.integration.elastic.scripts import (
    TIMEOUTS,
    accuracy_of,
    ask_for_the_end,
    folder_with_digits,
    kill,
    start,
)
from tests.integration.jobs import PYTHONPATH, Ended, Job


def confirmed(said: str) -> int:
    """Return how many steps of a process were confirmed, by its own words."""
    lines = [line for line in said.splitlines() if line.startswith("confirmed ")]
    return int(lines[-1].split()[1]) if lines else 0


def check_counts(ended: list[Ended], steps: dict[int, int], killed: dict[int, int]) -> None:
    """Check that every confirmed push of every process was counted once, in all elements of all keys.

    Args:
        ended: the processes that have ended well.
        steps: of them, by their number.
        killed: how many steps of the other processes were confirmed; one more may have been.
    """
    for one in ended:
        assert one.code == 0, one.text
        words = [line.split() for line in one.out.splitlines() if line.startswith(("least ", "most "))]
        assert len({key for _, key, *_ in words}) >= 2, one.text
        for _, key, *counts in words:
            for number in range(PLACES):
                found = int(counts[number])
                if number in killed:
                    assert found in (killed[number], killed[number] + 1), (key, number, one.text)
                else:
                    assert found == steps.get(number, 0), (key, number, one.text)


def run_with_deaths(folder: Path, **variables: Any) -> None:
    """Kill rank 0, have it join again, then kill rank 1, and check what the others have."""
    with Job(folder, 3, NETSTORM_ELASTIC="1:4", **TIMEOUTS, **variables) as job:
        for rank in range(3):
            start(job, rank, COUNTS, NUMBER=rank)
        job.wait_until_said(0, "confirmed 5")
        kill(job, 0)
        killed = {0: confirmed(job.said(0))}
        job.wait_until_said(1, "with ranks (1, 2)")
        start(job, 0, COUNTS, NUMBER=3)
        job.wait_until_said(0, "confirmed 5")
        kill(job, 1)
        killed[1] = confirmed(job.said(1))
        job.wait_until_said(0, "with ranks (0, 2)")
        ask_for_the_end(folder)
        ended = [job.end(0), job.end(2)]
    steps = {3: confirmed(ended[0].out), 2: confirmed(ended[1].out)}
    check_counts(ended, steps, killed)
    assert any("handed over: 0" not in one.out for one in ended)


def test_every_confirmed_push_counts_once_after_owners_were_killed_and_one_has_joined(tmp_path: Path) -> None:
    run_with_deaths(tmp_path, CHUNK_SIZE=5000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"NETSTORM_STALENESS": 2, "CLOCK": 1, "COMPRESSION": 1},
        {"FUNCTION": 1},  # whole keys, and a rule of which only the values are known
    ],
)
def test_so_it_is_with_bounds_and_compression_and_a_users_own_function(
    tmp_path: Path, variables: dict[str, Any]
) -> None:
    run_with_deaths(tmp_path, **variables)


@pytest.mark.slow
def test_a_clock_ends_once_its_pushes_have_been_applied(tmp_path: Path) -> None:
    with Job(tmp_path, 2, NETSTORM_ELASTIC="1:2", NETSTORM_STALENESS=1, **TIMEOUTS) as job:
        for rank in range(2):
            start(job, rank, LATE_GRADIENT, NUMBER=rank)
        ended = job.end_all()
    assert [one.code for one in ended] == [0, 0], [one.text for one in ended]
    assert "counts 1 2" in ended[1].out


@pytest.mark.slow
def test_owner_and_replica_that_die_together_end_the_job_or_lose_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", CHUNK_SIZE=5000, **TIMEOUTS) as job:
        for rank in range(3):
            start(job, rank, COUNTS, NUMBER=rank)
        job.wait_until_said(2, "confirmed 5")
        job.send(-1, signal.SIGSTOP)  # or what the first has may be with others before the second dies
        for rank in (0, 1):
            job.send(rank, signal.SIGKILL)
        for rank in (0, 1):
            job.end(rank)
        job.send(-1, signal.SIGCONT)
        last = job.end(2)
    assert last.code != 0
    assert "its owner and its replica have left together (ranks 0, 1)" in last.text


@pytest.mark.slow
def test_a_rank_that_the_launcher_starts_again_trains_as_long_as_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    command = (sys.executable, "-m", "netstorm", "launch", "-n", "3", "--restarts", "1", "--")
    ended = subprocess.run(
        [*command, sys.executable, str(script)],
        env={**os.environ, "NETSTORM_ELASTIC": "1:3", "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for line in ("[1] least 30 5 30 0 0 30 0 0", "[1] most 30 5 30 0 0 30 0 0", "[0] most 30 5 30 0 0 "):
        assert line in ended.stdout, ended.stdout


def run_alone(folder: Path, optimizer: str, dtype: str = "float32") -> None:
    """Have blocks go from owner to owner while one rank pushes, which compares the values in each step."""
    steps = folder / "steps"

    def until(number: int) -> None:
        new = folder / "new"
        new.write_text(str(number))
        new.replace(steps)
        job.wait_until_said(1, f"step {number}\n")

    steps.write_text("0")
    more = {"CHUNK_SIZE": 2000, "OPTIMIZER": optimizer, "DTYPE": dtype}
    with Job(folder, 3, NETSTORM_ELASTIC="1:4", **TIMEOUTS, **more) as job:
        for rank in range(3):
            start(job, rank, ALONE, NUMBER=rank)
        until(4)
        kill(job, 0)
        until(7)
        start(job, 0, ALONE, NUMBER=3)
        job.wait_until_said(0, "with ranks (0, 1, 2)")
        until(9)
        kill(job, 2)
        until(12)
        ask_for_the_end(folder)
        ended = [job.end(rank) for rank in (0, 1)]
    assert [one.code for one in ended] == [0, 0], ended[0].text + ended[1].text
    assert "states are equal: " in ended[1].out
    assert "states are equal: 0" not in ended[1].out


def test_states_and_counts_go_on_at_new_owners_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run_alone(tmp_path, "('Adam', {})")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("('SGD', {'momentum': 0.9, 'multi_precision': True})", "float16"),  # states that are nested
        ("('LAMB', {})", "float32"),  # norms of whole keys
    ],
)
def test_so_do_those_of_other_optimizers(tmp_path: Path, optimizer: str, dtype: str) -> None:
    run_alone(tmp_path, optimizer, dtype)


@pytest.mark.slow
def test_a_killed_and_a_new_rank_cost_no_accuracy(tmp_path: Path) -> None:
    folder = folder_with_digits(tmp_path / "job")
    with Job(folder, 3, NETSTORM_ELASTIC="2:4", **TIMEOUTS) as job:
        for rank in range(3):
            start(job, rank, DIGITS)
        job.wait_until_said(0, "step 20\n")
        kill(job, 2)
        start(job, 3, DIGITS)
        job.wait_until_said(0, "step 40\n")
        start(job, 2, DIGITS)
        ended = [job.end(rank) for rank in range(4)]
    assert [one.code for one in ended] == [0] * 4, [one.text for one in ended]
    assert min([accuracy_of(one) for one in ended]) > 0.87
