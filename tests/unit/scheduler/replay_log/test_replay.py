"""A replayed job is as its records say."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.protocol.messages import KeySpec
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log import ReplayedJob
from tests.unit.scheduler.driving import star
from tests.unit.scheduler.replay_log.sample_log import MEMBERS, RECORDS, began


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
    assert ReplayedJob.replay([*RECORDS, r.JobEnded(text="well")], "log") is None


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([began(members=MEMBERS[::-1])], "members that are not one process a rank"),
        ([began(members=(MEMBERS[0],) * 3)], "members that are not one process a rank"),
        ([began(policy=star(4))], "policies for other numbers of nodes than 3"),
        ([began(chunks=(0, 8, 16))], "chunks of 0 to 8 bytes"),
        ([began(owners=(1, 1))], "2 owners' weights for 3 nodes"),
        ([*RECORDS, r.RankFinished(rank=3, last_rounds={})], "ranks that there are not"),
        ([*RECORDS, r.BarrierArrival(rank=1, number=1 << 60)], "barriers that nobody reaches"),
        ([*RECORDS, RECORDS[1]], "keys that no node registers"),
        ([*RECORDS, r.KeyAdded(rank=0, spec=KeySpec(0, "c", (4,), "text"), version=1)], "keys that no node"),
        ([*RECORDS, r.Leased(rounds=((0, 1 << 60),))], "rounds that nobody reaches"),
    ],
)
def test_what_cannot_be_one_job_is_an_error_that_names_the_log(records, problem):
    with pytest.raises(UsageError, match=f"the log contradicts itself .*{problem}"):
        ReplayedJob.replay(records, "the log")


def test_a_scheduler_that_goes_on_with_a_log_has_the_secret_that_the_nodes_know():
    secret, other = SchedulerSecret(b"s" * 32), SchedulerSecret(b"o" * 32)
    data = r.MAGIC + r.encode([began(secret=secret.hidden())])
    job = ReplayedJob.replay(r.read(data, "the log")[0], "the log")
    assert job is not None
    options = SchedulerOptions(num_workers=len(job.members), job=job.began.job, secret=other)
    machine = SchedulerMachine(options, job.policies[job.version], now=0.0, replayed=job)
    assert machine.options.secret == secret
