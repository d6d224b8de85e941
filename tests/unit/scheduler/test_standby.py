"""A scheduler that takes a job over asks nodes to come."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import JobReport, KeyGrant, KeySpec, Member, Resume
from netstorm.pslite.machine import Connect, Disconnect, Send
from netstorm.pslite.proofs import SchedulerSecret, proof_for_offer
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.standby import PeerInquiry, ReportedJob, check_report
from tests.unit.scheduler.driving import star

MEMBERS = tuple(m.Member(rank, f"n{rank}", 4000, "", 10 + rank) for rank in range(3))
FIRST, SECOND, THIRD = Peer(-2), Peer(-3), Peer(-4)


class Asking:
    """A scheduler of three nodes, of which it knows the first."""

    def __init__(self, **options):
        self.options = SchedulerOptions(
            **{
                "num_workers": 3,
                "job": "alexnet",
                "heartbeat_timeout_s": 10.0,
                "link_timeout_s": 5.0,
                "join_timeout_s": 60.0,
                **options,
            }
        )
        self.inquiry = PeerInquiry([("n0", 4000)], ("new", 9091), self.options, 0.0)

    def tick(self, now, waiting=""):
        """Return the hosts that are asked."""
        self.inquiry.tick(now, waiting)
        taken = self.inquiry.take_instructions()
        assert all(one.message == m.Recover(host="new", port=9091) for one in taken if isinstance(one, Send))
        return [one.host for one in taken if isinstance(one, Connect)]

    def answer(self, peer, rank, now, *, accepted=False, members=MEMBERS, elastic=None):
        self.inquiry.answered(
            peer,
            m.RecoverAnswer(
                accepted=accepted, scheduler="old:9091", rank=rank, members=members, elastic=elastic
            ),
            now,
        )


def test_the_members_that_a_peer_names_are_asked_too_again_and_again():
    asking = Asking()
    assert asking.tick(0.0) == ["n0"]
    asking.answer(FIRST, 0, 0.1, accepted=True)
    assert sorted(asking.tick(0.1)) == ["n0", "n1", "n2"]
    asking.answer(FIRST, 0, 0.2, accepted=True)
    asking.answer(SECOND, 1, 0.2)
    assert asking.tick(1.1) == ["n0", "n1"]
    asking.inquiry.lost(THIRD, "no answer")
    assert asking.tick(2.1) == ["n2"]
    asking.inquiry.end()
    taken = asking.inquiry.take_instructions()
    assert [one.peer for one in taken if isinstance(one, Disconnect)] == [FIRST, SECOND, THIRD]


def test_a_node_is_asked_at_one_address_only():
    asking = Asking()
    asking.tick(0.0)
    elsewhere = (m.Member(0, "10.0.0.1", 4000, "", 10), *MEMBERS[1:])
    asking.answer(FIRST, 0, 0.1, members=elsewhere)
    assert sorted(asking.tick(5.0)) == ["n0", "n1", "n2"]


def test_once_nodes_had_the_time_to_notice_they_have_a_scheduler_if_all_say_so():
    asking = Asking()
    asking.tick(0.0)
    asking.answer(FIRST, 0, 1.0)
    asking.tick(20.0)
    assert asking.inquiry.error == ""
    asking.tick(21.0)
    assert "job 'alexnet' has a scheduler, at old:9091: 1 nodes follow it" in asking.inquiry.error
    assert "end its process first" in asking.inquiry.error


def test_it_goes_on_while_one_node_comes_and_its_time_always_moves_on():
    asking = Asking()
    asking.tick(0.0)
    asking.answer(FIRST, 0, 1.0, accepted=True)
    for now in range(2, 60):
        asking.tick(float(now), waiting="1 of 3 nodes have come, without rank 1")
        assert asking.inquiry.error == ""
        assert asking.inquiry.next_tick() > now
    asking.tick(60.0, waiting="1 of 3 nodes have come, without rank 1")
    assert asking.inquiry.error == (
        "1 of 3 nodes have come, without rank 1, within 60 s (NETSTORM_JOIN_TIMEOUT)"
    )


def test_a_scheduler_that_cannot_take_the_job_over_is_told_at_once_why():
    other = Asking(num_workers=2)
    other.tick(0.0)
    other.answer(FIRST, 0, 0.1, elastic=(1, 3))
    assert "its job has 3 ranks and NETSTORM_ELASTIC=1:3, this scheduler 2 and none" in other.inquiry.error
    without_secret = Asking()
    without_secret.tick(0.0)
    unproven = m.RecoverAnswer(accepted=False, scheduler="old:9091", rank=0, members=MEMBERS, unproven=True)
    without_secret.inquiry.answered(FIRST, unproven, 0.1)
    assert "NETSTORM_SCHEDULER_KEY" in without_secret.inquiry.error


def test_the_error_says_what_each_peer_that_does_not_answer_does():
    asking = Asking()
    asking.tick(0.0)
    asking.inquiry.lost(FIRST, "no connection to n0:4000 for 5 s: refused")
    asking.tick(60.0)
    assert "no node of job 'alexnet' comes: n0:4000: no connection to n0:4000" in asking.inquiry.error


@pytest.mark.parametrize(
    "reason",
    [
        "n0:4000 refused this process: this is a node of job 'vgg', not of 'alexnet'",
        "n0:4000 refused this process: this is the scheduler of job 'alexnet', not rank -2",
        "n0:4000 requires a key, and this process has none: set NETSTORM_KEY_FILE to a copy of the job's key",
    ],
)
def test_a_peer_of_another_kind_is_an_error_at_once_unless_another_peer_has_answered(reason):
    asking = Asking()
    asking.inquiry.lost(FIRST, reason)
    assert f"--peers n0:4000: {reason}: expected a node of job 'alexnet'" in asking.inquiry.error
    asking = Asking()
    asking.tick(0.0)
    asking.answer(FIRST, 0, 0.1)
    asking.inquiry.lost(SECOND, reason)
    asking.inquiry.lost(FIRST, reason)
    assert asking.inquiry.error == ""


def test_a_node_of_a_job_with_a_key_is_asked_once_more_with_a_proof():
    secret = SchedulerSecret(b"s" * 32)
    asking = Asking(secret=secret)
    members = tuple(msgspec.structs.replace(one, user=f"key {one.rank}") for one in MEMBERS)
    unproven = m.RecoverAnswer(accepted=False, scheduler="old:9091", rank=0, members=members, unproven=True)
    asking.tick(0.0)
    asking.inquiry.answered(FIRST, unproven, 0.1)
    asking.inquiry.tick(0.1, "")
    sent = [one.message for one in asking.inquiry.take_instructions() if isinstance(one, Send)]
    proof = proof_for_offer(secret.key_for("alexnet", members[0]), "new", 9091)
    assert sent == [m.Recover(host="new", port=9091, proof=proof)]
    assert asking.inquiry.error == ""
    asking.inquiry.answered(FIRST, unproven, 0.2)
    assert "--peers n0:4000: it follows only schedulers with the secret of the one before" in (
        asking.inquiry.error
    )


# ----------------------------------------------------------------------------- a job as its nodes report it


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


# ------------------------------------------------------------------------------- a node's report of its job


PLACES = (Member(0, "a", 4000, "", 10), Member(1, "b", 4000, "", 11), Member(2, "", 0, "", 0))
CHECKED = JobReport(
    members=PLACES,
    policy=star(3),
    specs=(KeySpec(0, "w", (4,), "float32"),),
    grants=(KeyGrant(0, "w", 0, 0, 0, 4),),
    granted={0: 3},
    finished={1: {0: 3}},
    barriers=2,
)


def check(incarnation=10, user="", **fields):
    report = msgspec.structs.replace(CHECKED, **fields)
    check_report(Resume(keys=(), begun=(), barriers=(), job=report), incarnation, user, 3)


def test_the_report_of_a_correct_node_is_taken():
    check()
    check_report(Resume(keys=(), begun=(), barriers=()), 99, "", 3)


def test_nobody_reports_a_job_that_it_is_not_in():
    with pytest.raises(ProtocolViolation, match="not a member of"):
        check(12)
    with pytest.raises(ProtocolViolation, match="not a member of"):
        check(10, "another key than in its report")


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": PLACES[:2]},
        {"members": (PLACES[0], PLACES[0], PLACES[2])},
        {"members": (PLACES[0], Member(1, "b", 4000, "", 10), PLACES[2])},
        {"policy": star(2)},
        {"barriers": -1},
        {"grants": ()},
        {"grants": (KeyGrant(0, "w", 0, 0, 0, 0),)},
        {"grants": (KeyGrant(0, "v", 0, 0, 0, 4),)},
        {"specs": (KeySpec(0, "w", (4,), "complex64"),)},
        {"specs": (KeySpec(0, "w", (-4,), "float32"),)},
        {"granted": {-1: 3}},
        {"finished": {3: {}}},
        {"grants": (KeyGrant(0, "w", 2**17, 0, 0, 4),)},
        {"policies": (star(2, 4),)},
        {"rows": {0: ((0, 7),)}},
        {"rows": {0: ((-1, 1),)}},
        {"rows": {0: ()}},
    ],
    ids=str,
)
def test_a_report_whose_parts_do_not_fit_together_is_refused(wrong):
    with pytest.raises(ProtocolViolation, match="a node reports a job with"):
        check(**wrong)
