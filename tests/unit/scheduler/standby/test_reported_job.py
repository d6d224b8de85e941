"""A job as its nodes report it."""

import msgspec
import pytest

from netstorm.protocol.messages import JobReport, KeyGrant, KeySpec, Member, Resume
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.standby import ReportedJob
from tests.unit.scheduler.driving import star

MEMBERS = tuple(Member(rank, f"n{rank}", 4000, "", 10 + rank) for rank in range(3))


def spec(number):
    return KeySpec(0, f"w{number}", (4,), "float32")


def grant(number):
    return KeyGrant(0, f"w{number}", number, 0, 0, 4)


REPORT = JobReport(
    members=MEMBERS,
    policy=star(3, 1),
    specs=(spec(0),),
    grants=(grant(0),),
    granted={0: 5},
    finished={},
    barriers=2,
    rows={0: ((0, 1),)},
    majority=True,
)


def reported(*reports, views=None, users=("",) * 3):
    job = ReportedJob()
    for rank, changes in enumerate(reports):
        report = msgspec.structs.replace(REPORT, **changes)
        view = 0 if views is None else views[rank]
        job.add(10 + rank, users[rank], Resume(keys=(), begun=(), barriers=(), job=report, view=view))
    return job


def options(**more):
    return SchedulerOptions(num_workers=3, job="alexnet", **more)


@pytest.mark.parametrize("majority", [True, False])
def test_a_majority_counts_only_if_the_scheduler_before_needs_one(majority):
    job = reported({"majority": majority}, {"majority": majority})
    assert job.has_majority() is majority
    assert not job.is_complete()
    needed = "more than half" if majority else "started without NETSTORM_RECOVERABLE=1"
    text = job.missing_text(elastic=True)
    assert "2 of 3 nodes have come, without rank 2 (n2:4000)" in text
    assert needed in text
    assert "nodes may not leave this job" in job.missing_text(elastic=False)


def test_who_comes_with_another_key_than_the_one_of_the_member_that_it_says_it_is_does_not_count():
    members = tuple(Member(rank, f"n{rank}", 4000, "", 10 + rank, f"key {rank}") for rank in range(3))
    job = reported({"members": members}, {"members": members}, users=("key 0", "key 2"))
    assert job.present() == [0]
    assert not job.has_majority()
    job.add(11, "key 1", Resume(keys=(), begun=(), barriers=(), job=REPORT))
    assert job.present() == [0, 1]


def test_the_newest_view_says_who_decides():
    later = tuple(
        Member(one.rank, one.host, 0 if one.rank == 2 else 4000, "", one.incarnation) for one in MEMBERS
    )
    job = reported({"members": later}, {}, views=(1, 0))
    assert job.is_complete()
    assert job.replayed(options(elastic=(1, 3))).agreed_size == 2


def test_a_node_that_has_gone_counts_no_more():
    job = reported({}, {}, {})
    assert job.is_complete()
    job.remove(11)
    assert job.present() == [0, 2]
    job.remove_rank(2)
    job.remove_rank(7)
    assert job.present() == [0]


def test_what_any_node_was_granted_goes_on_as_it_knows_it_and_what_follows_runs_under_the_newest_policy():
    """In a job that nodes may not leave, all report. Policy 2 has been announced to rank 2 alone."""
    newer = {
        "policy": star(3, 2),
        "granted": {0: 7},
        "rows": {0: ((0, 1), (6, 2))},
        "policies": (star(3, 1),),
    }
    replayed = reported({}, {}, newer).replayed(options())
    assert (replayed.version, sorted(replayed.policies)) == (2, [1, 2])
    assert (replayed.granted, replayed.rows) == ([7], [[(0, 1), (6, 2)]])
    newest = {"policy": star(3, 3), "policies": (star(3, 1),)}
    replayed = reported(newest, newer, {}).replayed(options())
    assert (replayed.granted, replayed.rows) == ([7], [[(0, 1), (6, 2), (8, 3)]])


def test_in_an_elastic_job_all_runs_under_the_policy_of_the_next_view():
    replayed = reported({}, {"granted": {0: 9}}, {}).replayed(options(elastic=(1, 3)))
    assert replayed.granted[0] > 1000
    assert replayed.rows == [[(0, 1)]]
    assert replayed.taken_over


def test_keys_of_groups_keep_their_numbers_even_if_nobody_has_those_between():
    first = {"specs": (spec(0), spec(3)), "grants": (grant(0), grant(3)), "rows": {}}
    replayed = reported(
        first, {"specs": (spec(0), spec(1)), "grants": (grant(0), grant(1)), "rows": {}}, {}
    ).replayed(options())
    assert [one.key for one in replayed.grants] == [0, 1, 2, 3]
    assert [one.name for _, one in replayed.keys] == ["w0", "w1", "key 2 of ranks that are gone", "w3"]
    assert len(replayed.rows) == len(replayed.granted) == 4


def test_a_reproducible_job_stays_one_whatever_the_scheduler_that_takes_it_over_was_given():
    job = reported(*[{"reproducible": True}] * 3)
    assert job.replayed(options()).began.reproducible
