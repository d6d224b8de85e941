"""A scheduler that takes a job over asks nodes to come."""

import msgspec
import pytest

from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Connect, Disconnect, Send
from netstorm.pslite.proofs import SchedulerSecret, proof_for_offer
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.standby import PeerInquiry

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


def test_settings_that_are_not_the_job_s_are_an_error_that_names_them():
    asking = Asking(num_workers=2)
    asking.tick(0.0)
    asking.answer(FIRST, 0, 0.1, elastic=(1, 3))
    assert "its job has 3 ranks and NETSTORM_ELASTIC=1:3, this scheduler 2 and none" in asking.inquiry.error


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


def test_a_scheduler_without_a_secret_is_told_at_once_that_it_needs_one():
    asking = Asking()
    asking.tick(0.0)
    asking.inquiry.answered(
        FIRST,
        m.RecoverAnswer(accepted=False, scheduler="old:9091", rank=0, members=MEMBERS, unproven=True),
        0.1,
    )
    assert "NETSTORM_SCHEDULER_KEY" in asking.inquiry.error
