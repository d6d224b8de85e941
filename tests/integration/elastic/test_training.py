"""A CNN learns digits as well when a rank dies and others join as without any of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic.scripts import (
    DIGITS,
    TIMEOUTS,
    accuracy_of,
    digest_of,
    folder_with_digits,
    kill,
    start,
)
from tests.integration.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def undisturbed(folder: Path) -> float:
    """Return the accuracy of four ranks that all stay."""
    with Job(folder, 4, NETSTORM_ELASTIC="1:5", **TIMEOUTS) as job:
        for rank in range(4):
            start(job, rank, DIGITS)
        ended = job.end_all(250)
    assert len({digest_of(one) for one in ended}) == 1
    return accuracy_of(ended[0])


def test_the_accuracy_is_that_of_an_undisturbed_job_and_all_weights_are_equal(tmp_path: Path) -> None:
    expected = undisturbed(folder_with_digits(tmp_path / "undisturbed"))
    folder = folder_with_digits(tmp_path / "disturbed")
    with Job(folder, 4, NETSTORM_ELASTIC="1:5", ALL=5, **TIMEOUTS) as job:
        for rank in range(4):
            start(job, rank, DIGITS)
        job.wait_until_said(0, "ranks (0, 1, 2, 3)")
        kill(job, 0)
        job.wait_until_said(1, "ranks (1, 2, 3)")
        start(job, 0, DIGITS)
        start(job, 4, DIGITS)
        ended = [job.end(rank, 250) for rank in range(5)]
    assert len({digest_of(one) for one in ended}) == 1
    assert "ranks (0, 1, 2, 3, 4)" in ended[1].out
    reached = accuracy_of(ended[0])
    print(f"accuracy: {expected:.4f} undisturbed, {reached:.4f} with a kill, a return and a join")
    assert min(expected, reached) > 0.9
    assert abs(expected - reached) < 0.04
