"""A replayed job is as its records say."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.messages import KeySpec
from netstorm.pslite.machine import Admit
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log import LEASE, Leases, ReplayedJob
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import Driven, star
from tests.unit.scheduler.sample_log import MEMBERS, RECORDS, began


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


def test_who_joined_later_is_waited_for_from_the_first_barrier_on_that_was_not_reached_then():
    """A process that was rank 2 was at one barrier more than the others; its place has another one since."""
    arrivals = [r.BarrierArrival(rank=rank, number=0) for rank in (0, 1, 2)]
    came = msgspec.structs.replace(MEMBERS[2], incarnation=99)
    absent = star(3, version=3), msgspec.structs.replace(star(3, version=4), members=(0, 1, 2), silent=(2,))
    records = [
        *(began(), *arrivals, r.BarrierArrival(rank=2, number=1)),
        r.Installed(policy=msgspec.structs.replace(absent[0], members=(0, 1)), starts=()),
        r.Viewed(view=1, version=3, members=MEMBERS[:2]),
        r.Installed(policy=absent[1], starts=()),
        r.Viewed(view=2, version=4, members=(*MEMBERS[:2], came)),
        *(r.BarrierArrival(rank=rank, number=1) for rank in (0, 1)),
    ]
    job = ReplayedJob.replay(records, "log")
    assert job is not None
    assert (job.barriers, job.reached) == ([2, 2, 0], 2)
    contributes = msgspec.structs.replace(absent[1], version=5, silent=())
    job.apply(r.Installed(policy=contributes, starts=()))
    job.apply(r.BarrierArrival(rank=0, number=2))
    assert (job.barriers, job.reached) == ([3, 2, 2], 2)
    job.apply(r.BarrierArrival(rank=2, number=1))  # it is behind
    assert (job.barriers, job.reached) == ([3, 2, 2], 2)


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


# ----------------------------------------------------------- a scheduler that goes on where another one was


def going_on(**options: Any) -> Driven:
    """Return a scheduler that goes on with the job of `RECORDS`, whose nodes r0, r1 and r2 have found it."""
    job = ReplayedJob.replay(RECORDS, "log")
    assert job is not None
    driven = Driven(len(job.members), **options)
    driven.machine = SchedulerMachine(driven.options, job.policies[job.version], now=driven.now, replayed=job)
    for member in job.members:
        name = f"r{member.rank}"
        assert isinstance(driven.hello(name, incarnation=member.incarnation, sender=member.rank), Admit)
    return driven


def resume(**fields: Any) -> m.Resume:
    return m.Resume(**{"keys": (), "begun": (), "barriers": (), **fields})


def test_nodes_have_time_to_find_the_scheduler():
    driven = going_on(heartbeat_timeout_s=10.0, link_timeout_s=8.0)
    driven.run(17.5)
    assert driven.machine.phase is JobPhase.RUNNING
    driven.run(3.0)
    assert driven.exit_code() == 1


def test_a_rank_that_has_not_been_heard_yet_has_not_proved_that_a_link_to_it_is_broken():
    driven = going_on()
    driven.say("r0", resume(suspected=(1,)))
    driven.run(5.0)
    assert driven.machine.failed_links == ()
    assert driven.machine.phase is JobPhase.RUNNING


def test_barriers_at_which_nodes_wait_are_reached_whether_the_log_knows_of_them_or_not():
    driven = going_on()
    driven.say("r2", resume(barriers=(0,), last_rounds={0: 4}))  # of both the log knows
    driven.say("r0", resume(barriers=(0,)))
    driven.forget()
    driven.say("r1", resume(barriers=(0,)))
    assert [driven.heard(f"r{rank}", m.BarrierReached) for rank in range(3)] == [[m.BarrierReached(0)]] * 3
    driven.say("r1", resume(barriers=(0,)))
    assert driven.heard("r1", m.BarrierReached) == [m.BarrierReached(0)], "the answer was lost"
    assert driven.machine.phase is JobPhase.RUNNING


def test_a_rank_that_has_finished_is_waited_for_at_no_barrier_where_scripts_may_end_unevenly():
    driven = going_on(joins=True)
    for number in range(2):
        for rank in range(2):
            driven.say(f"r{rank}", m.Barrier(number=number))
    assert driven.heard("r0", m.BarrierReached) == [m.BarrierReached(0), m.BarrierReached(1)]
    driven.say("r0", m.Barrier(number=2))
    driven.forget()
    driven.say("r1", m.Finished(last_rounds={}))
    assert driven.heard("r0", m.BarrierReached) == [m.BarrierReached(2)], "nor is one that finishes now"


# ------------------------------------------------------- what is read from a replay log is what was written


@given(st.integers(0, 10_000))
def test_whatever_is_missing_at_the_end_only_the_last_record_is_lost(cut):
    parts = [r.MAGIC, *(r.encode([record]) for record in RECORDS)]
    data = b"".join(parts)
    cut %= len(data) + 1
    records, size = r.read(data[:cut], "log")
    whole = [at for at in range(len(parts) + 1) if len(b"".join(parts[:at])) <= cut][-1]
    assert records == RECORDS[: max(0, whole - 1)]
    assert size == len(b"".join(parts[:whole]))


def test_an_end_that_was_never_written_is_no_record():
    data = r.MAGIC + r.encode(RECORDS)
    assert r.read(data + bytes(1000), "log") == (RECORDS, len(data))


@given(st.integers(0, 2**32))
def test_a_bit_that_changed_is_an_error_or_a_torn_end_and_never_another_job(seed):
    chance = random.Random(seed)
    data = bytearray(r.MAGIC + r.encode(RECORDS))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    try:
        records, _ = r.read(bytes(data), "log")
    except UsageError as error:
        assert "log" in str(error)
    else:
        assert records == RECORDS[: len(records)]
        assert len(records) < len(RECORDS)


@pytest.mark.parametrize("data", [b"something else", b"NSSTATE\x02" + bytes(8)])
def test_what_is_no_log_of_this_version_is_an_error_that_says_so(data):
    with pytest.raises(UsageError, match=r"state\.log is (not a scheduler's log|written by another version)"):
        r.read(data, "state.log")


# ---------------------------------------------------------------------------------- grants are logged ahead


def test_grants_are_written_down_ahead_and_only_once():
    leases = Leases()
    assert leases.extend([(0, 1), (1, 1)]) == r.Leased(rounds=((0, 1 + LEASE), (1, 1 + LEASE)))
    for round in range(2, 2 + LEASE):
        assert leases.extend([(0, round)]) is None
    assert leases.extend([(0, 2 + LEASE)]) == r.Leased(rounds=((0, 2 + 2 * LEASE),))
