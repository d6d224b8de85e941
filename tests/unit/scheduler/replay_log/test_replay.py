"""A replayed job is as its records say."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.scheduler.replay_log import records as r
from netstorm.scheduler.replay_log.replay import ReplayedJob
from tests.unit.scheduler.replay_log.sample_log import MEMBERS, RECORDS


def test_a_job_is_as_its_log_says():
    data = r.MAGIC + r.encode(RECORDS)
    records, size = r.read(data, "log")
    assert records == RECORDS
    assert size == len(data)
    job = ReplayedJob.replay(records, "log")
    assert job is not None
    assert job.members == MEMBERS
    assert job.version == 2
    assert [spec.name for _, spec in job.keys] == ["w", "b"]
    assert job.rows == [[(0, 1), (5, 2)], [(0, 1), (3, 2)]]
    assert job.granted == [33, 17]
    assert job.barriers == [0, 0, 1]
    assert job.finished == {2: {0: 4}}


def test_a_log_without_a_beginning_is_an_error():
    with pytest.raises(UsageError, match="in the middle of a job"):
        ReplayedJob.replay(RECORDS[1:], "log")


def test_a_job_that_is_over_is_not_taken_over():
    assert ReplayedJob.replay([*RECORDS, r.Ended(text="well")], "log") is None
