"""MixedSync of MXNet in elastic jobs of real processes: leaders die, others lead, and ranks join."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic.mixed_sync_scripts import SUMS
from tests.integration.elastic.scripts import TIMEOUTS, ask_for_the_end, kill, start
from tests.integration.elastic.test_asynchronous import confirmed
from tests.integration.jobs import Ended, Job


def check_counts(ended: list[Ended], steps: dict[int, tuple[int, int]]) -> None:
    """Check that the processes that have ended well have the same counts of gradients, in all elements.

    Args:
        ended: they.
        steps: least and most steps of each process that may be in a value, by its number.
    """
    found = [[line for line in one.out.splitlines() if line.startswith(("least ", "most "))] for one in ended]
    assert all(one.code == 0 for one in ended), [one.text for one in ended]
    assert all(lines == found[0] for lines in found)
    assert len(found[0]) == 4
    for line in found[0]:
        _, _, *counts = line.split()
        for number, (least, most) in steps.items():
            assert least <= int(counts[number]) <= most, (number, steps, found[0])


@pytest.mark.slow
def test_sites_go_on_without_their_leaders_and_every_sum_is_pushed_once(tmp_path: Path) -> None:
    sites = "aabb"
    settings = {"CHUNK_SIZE": 5000, "NETSTORM_STALENESS": 2, "OPTIMIZER": "SGD", **TIMEOUTS}
    with Job(tmp_path, 4, NETSTORM_ELASTIC="1:4", **settings) as job:
        for rank, site in enumerate(sites):
            start(job, rank, SUMS, NUMBER=rank, NETSTORM_SITE=site)
        for rank, site in enumerate(["(0, 1)", "(2, 3)"]):
            job.wait_until_said(2 * rank + 1, f"site of {site}")
        kill(job, 0)
        killed = {0: confirmed(job.said(0))}
        job.wait_until_said(1, "site of (1,)")
        start(job, 0, SUMS, NUMBER=4, NETSTORM_SITE="a")
        job.wait_until_said(0, "site of (0,)")
        kill(job, 2)
        killed[2] = confirmed(job.said(2))
        job.wait_until_said(3, "site of (3,)")
        ask_for_the_end(tmp_path)
        ended = {rank: job.end(rank) for rank in (0, 1, 3)}
    steps = {rank: confirmed(one.out) for rank, one in ended.items()}
    check_counts(
        list(ended.values()),
        {
            # The push of the step in which its leader has died may be lost, with the other's gradients.
            1: (steps[1] - 1, steps[1]),
            3: (steps[3] - 1, steps[3]),
            0: (killed[0], killed[0] + 1),
            2: (killed[2], killed[2] + 1),
            4: (steps[0], steps[0]),
        },
    )


@pytest.mark.slow
def test_who_begins_to_lead_corrects_no_gradients_by_what_the_former_has_pulled(tmp_path: Path) -> None:
    """One site alone: no gradient is late, so DCASGD corrects none."""
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", CHUNK_SIZE=5000, OPTIMIZER="DCASGD", **TIMEOUTS) as job:
        for rank in range(3):
            start(job, rank, SUMS, NUMBER=rank, NETSTORM_SITE="a")
        killed = []
        for rank, left in enumerate(["(1, 2)", "(2,)"]):
            job.wait_until_said(2, f"confirmed {20 * (rank + 1)}")
            kill(job, rank)
            killed.append(confirmed(job.said(rank)))
            job.wait_until_said(2, f"site of {left}")
        ask_for_the_end(tmp_path)
        last = job.end(2)
    steps = confirmed(last.out)
    # With each leader one push may be lost, which has the gradients of all.
    may_be = {0: (killed[0], killed[0] + 1), 1: (killed[1] - 1, killed[1] + 1), 2: (steps - 2, steps)}
    check_counts([last], may_be)
