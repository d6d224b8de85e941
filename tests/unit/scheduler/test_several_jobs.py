"""Several jobs on one scheduler machine: whose is what, who may come, and what one job's end leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.pslite.machine import Admission, Admit, Call, Disconnect, Send
from netstorm.scheduler.policies import FormationRequest
from netstorm.scheduler.policy_former import form
from netstorm.scheduler.several_jobs import (
    FirstPolicyRequest,
    SeveralJobs,
    form_first_policy,
    network_file_nodes,
)
from netstorm.scheduler.snapshot import JobPhase, Outcome
from netstorm.settings import Settings
from tests.unit.scheduler.driving import RELEASE, M, refused

NETWORK = """
nodes: {0: {}, 1: {}, 2: {}}
links:
  - {between: [0, 1], rate: 100Mbit, latency: 1ms}
  - {between: [1, 2], rate: 100Mbit, latency: 1ms}
  - {between: [0, 2], rate: 30Mbit, latency: 40ms}
"""


class Several:
    """The machine, and what it sent to each process. A process is known as "job/host"."""

    def __init__(self, **settings: object) -> None:
        self.now = 100.0
        own = Settings.from_environment({}, **{"jobs": 0, "topology": "fapt", **settings})
        self.machine = SeveralJobs(own, release=RELEASE, now=self.now, network_nodes=network_file_nodes(own))
        self.machine.on_first_policy = self._form_first
        self.over: list[Outcome] = []
        self.first_requests: list[FirstPolicyRequest] = []
        self.formations: list[FormationRequest] = []
        self.machine.on_form = self.formations.append
        self.machine.on_job_over = self.over.append
        self.hold = False
        self.peers: dict[str, Peer] = {}
        self.sent: dict[Peer, list[m.Message]] = {}
        self.disconnected: list[Peer] = []

    def _form_first(self, request: FirstPolicyRequest) -> None:
        self.first_requests.append(request)
        if not self.hold:
            self.machine.first_policy_formed(form_first_policy(request), self.now)

    def hello(self, who: str, *, sender: int = -1) -> Admission:
        hello = m.Hello(
            job=who.rpartition("/")[0],
            sender=sender,
            incarnation=int.from_bytes(who.encode()[-7:], "big"),
            receiver=SCHEDULER,
            session=1,
            received=0,
        )
        verdict = self.machine.admit(hello)
        if isinstance(verdict, Admit):
            self.peers[who] = verdict.peer
        return verdict

    def join(self, who: str, rank: int = -1, size: int = 2, **must_agree: str) -> None:
        assert isinstance(self.hello(who), Admit)
        join = m.Join(
            asked_rank=rank,
            num_workers=size,
            host=who.replace("/", "."),
            port=4000,
            site="",
            release=RELEASE,
            pid=1,
            must_agree=must_agree,
        )
        self.say(who, join)

    def start(self, job: str, size: int = 2, **must_agree: str) -> None:
        for rank in range(size):
            self.join(f"{job}/{rank}", rank, size, **must_agree)

    def say(self, who: str, message: m.Message) -> None:
        self.machine.receive(self.peers[who], message, None, 0, self.now)
        self.take()

    def take(self) -> None:
        while instructions := self.machine.take_instructions():
            for instruction in instructions:
                match instruction:
                    case Send(peer=peer, message=message):
                        self.sent.setdefault(peer, []).append(message)
                    case Disconnect(peer=peer):
                        self.disconnected.append(peer)
                    case Call(function=function):
                        function()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.machine.next_tick()) <= end:
            self.now = max(self.now, due)
            self.machine.tick(self.now)
            self.take()
        self.now = end

    def heard(self, who: str, kind: type[M]) -> list[M]:
        return [message for message in self.sent.get(self.peers[who], []) if isinstance(message, kind)]

    def why_refused(self, who: str) -> str:
        (gone,) = self.heard(who, m.PeerGone)
        assert gone.kind == "refused"
        assert self.peers[who] in self.disconnected
        return gone.reason

    def phases(self) -> dict[str, JobPhase]:
        return {one.options.job: one.phase for one in self.machine.jobs}


def test_processes_get_different_numbers_whatever_job_they_are_of():
    several = Several()
    several.start("a", 2)
    several.start("b", 2)
    assert len(set(several.peers.values())) == 4
    assert [several.heard(who, m.Joined)[0].rank for who in ("a/0", "a/1", "b/0", "b/1")] == [0, 1, 0, 1]
    assert {one.host for one in several.heard("a/1", m.Joined)[0].members} == {"a.0", "a.1"}


def test_a_job_that_has_not_begun_can_be_given_up_and_says_who_is_missing():
    several = Several()
    several.join("a/0", 0, 3)
    several.join("a/2", 2, 3)
    several.start("b", 2)
    for name in ("a", "b", "c"):
        several.machine.give_up(name, 5.0, several.now)
    several.take()
    for who in ("a/0", "a/2"):
        (gone,) = several.heard(who, m.PeerGone)
        assert gone.kind == "timeout"
        assert gone.reason.startswith("not every node came within 5 s: waiting for 1 of 3 nodes")
        assert gone.reason.endswith("not here: 1")
    assert several.heard("b/0", m.PeerGone) == []
    assert several.phases()["b"] is JobPhase.RUNNING


def test_the_first_to_join_says_how_many_nodes_the_job_has_and_others_must_agree():
    several = Several()
    several.join("a/0", 0, 3)
    several.join("a/1", 1, 2)
    assert "DMLC_NUM_WORKER=2" in several.why_refused("a/1")
    assert several.machine.job("a").options.num_workers == 3


def test_a_scheduler_that_was_told_the_number_of_nodes_takes_no_other():
    several = Several(num_workers=2)
    several.join("a/0", 0, 3)
    assert "DMLC_NUM_WORKER=3" in several.why_refused("a/0")
    assert several.phases() == {}
    several.start("a", 2)
    assert several.phases() == {"a": JobPhase.RUNNING}


@pytest.mark.parametrize(
    ("job", "size", "settings", "reason"),
    [
        *(("a", size, {}, f"DMLC_NUM_WORKER={size}") for size in (1025, 0, 2**62)),
        *((name, 1, {}, "NETSTORM_JOB") for name in ("", "a b", "../x", "x" * 65, "ä")),
        ("a", 2, {"NUM_ROOT_SERVERS": "5"}, "NUM_ROOT_SERVERS=5"),
        ("a", 2, {"CHUNK_SIZE": "many"}, "CHUNK_SIZE"),
        ("a", 2, {"NETSTORM_TOPOLOGY": "star"}, "NETSTORM_TOPOLOGY=star at the node"),
    ],
)
def test_nobody_opens_a_job_of_a_size_name_or_settings_that_none_may_have(job, size, settings, reason):
    several = Several()
    several.join(f"{job}/0", 0, size, **settings)
    assert reason in several.why_refused(f"{job}/0")
    assert several.phases() == {}


def test_what_the_scheduler_was_not_told_the_first_node_of_each_job_says():
    several = Several()
    several.join("large/0", 0, 1024)
    several.start("a", 2, CHUNK_SIZE="5000")
    several.start("b", 2, CHUNK_SIZE="7000", NETSTORM_JOB_WEIGHT="3")
    assert [several.machine.job(name).options.job_wide["CHUNK_SIZE"] for name in "ab"] == ["5000", "7000"]


def test_one_job_more_than_there_may_be_is_refused_by_name_and_may_come_once_another_has_ended():
    several = Several(most_jobs=2)
    several.start("a", 1)
    several.join("b/0", 0, 2)
    several.join("c/0", 0, 1)
    reason = several.why_refused("c/0")
    assert "no room for job 'c'" in reason
    assert "(a, b)" in reason
    assert "NETSTORM_MOST_JOBS" in reason
    several.say("b/0", m.Leave())
    several.start("d", 1)
    assert several.phases() == {"a": JobPhase.RUNNING, "d": JobPhase.RUNNING}


def test_a_failing_job_ends_alone_and_the_scheduler_goes_on():
    several = Several()
    several.start("a")
    several.start("b")
    several.say("a/0", m.Failed(reason="out of memory"))
    assert several.phases() == {"a": JobPhase.FAILED, "b": JobPhase.RUNNING}
    assert several.heard("a/1", m.PeerGone)
    assert not several.heard("b/0", m.PeerGone)
    several.say("a/1", m.Leave())
    several.run(0.5)
    assert several.phases() == {"b": JobPhase.RUNNING}
    assert [one.exit_code for one in several.over] == [1]
    assert several.machine.outcome is None


def test_an_error_of_the_schedulers_own_ends_only_the_job_that_it_happens_to(caplog, monkeypatch):
    several = Several()
    several.start("a")
    several.start("b")
    job = several.machine.job("a")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(job, "_receive_from_member", broken)
    several.say("a/0", m.Barrier(number=0))
    assert "ZeroDivisionError" in caplog.text
    assert several.phases() == {"a": JobPhase.FAILED, "b": JobPhase.RUNNING}
    assert "a mistake" in several.heard("a/1", m.PeerGone)[0].reason
    monkeypatch.setattr(job, "tick", broken)
    several.run(2.0)
    assert several.phases() == {"b": JobPhase.RUNNING}
    assert [one.exit_code for one in several.over] == [1]


def test_a_job_that_has_ended_and_one_of_an_unknown_name_are_not_known():
    several = Several()
    several.start("a", 1)
    with pytest.raises(UsageError, match="no job 'b' is here; there are: 'a'"):
        several.machine.job("b")
    several.say("a/0", m.Failed(reason="x"))
    several.run(0.5)
    assert several.phases() == {}
    assert "rank 0 of job 'a'" in refused(several.hello("a/0", sender=0))


def test_a_stranger_may_say_nothing_but_that_it_joins():
    several = Several()
    several.hello("a/0")
    several.say("a/0", m.Heartbeat())
    with pytest.raises(ProtocolViolation, match="Barrier"):
        several.say("a/0", m.Barrier(number=0))


def test_a_node_that_leaves_while_the_first_policy_is_formed_can_be_replaced():
    several = Several()
    several.hold = True
    several.start("a")
    several.say("a/1", m.Leave())
    several.machine.first_policy_formed(form_first_policy(several.first_requests[0]), several.now)
    assert several.phases() == {"a": JobPhase.GATHERING}
    several.join("a/new", 1)
    assert several.phases() == {"a": JobPhase.RUNNING}
    assert len(several.first_requests) == 1


def test_a_first_policy_that_cannot_be_formed_ends_the_job_with_the_reason():
    several = Several(topology="custom")
    several.start("a", 2)
    assert several.phases() == {"a": JobPhase.FAILED}
    assert "NETSTORM_TOPOLOGY_FILE" in several.heard("a/0", m.PeerGone)[0].reason


def test_stopped_with_no_job_here_it_ends_well():
    several = Several()
    several.machine.stop("stopped", several.now)
    assert several.machine.outcome is not None
    assert several.machine.outcome.exit_code == 0
    several.join("a/0", 0, 1)
    assert "being stopped" in several.why_refused("a/0")


# --------------------------------------------------------------------------------------- the shares of links


def network(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK)
    return {"network_file": str(file)}


def rate_of(question: FormationRequest) -> float:
    (link,) = (one for one in question.links if (one.source, one.target) == (0, 1))
    return link.rate


def test_jobs_on_one_network_plan_with_their_shares_of_it_and_one_that_ends_gives_its_share_back(tmp_path):
    several = Several(**network(tmp_path))
    several.start("a", 3)
    assert several.first_requests[-1].link_share == 1.0
    several.start("b", 3, NETSTORM_JOB_WEIGHT="3")
    assert several.first_requests[-1].link_share == 0.75
    assert [one.link_share for one in several.machine.snapshots(several.now)] == [0.25, 0.75]
    several.run(0.1)
    assert [rate_of(one) for one in several.formations] == [25e6]
    several.machine.policy_formed(form(several.formations[-1]), several.now)
    several.say("b/0", m.Failed(reason="x"))
    several.run(0.1)
    assert several.phases()["a"] is JobPhase.RUNNING
    assert rate_of(several.formations[-1]) == 100e6


def test_a_job_of_another_size_than_the_network_has_no_share_of_it(tmp_path, caplog):
    several = Several(**network(tmp_path))
    several.start("a", 3)
    several.start("b", 2)
    assert "job 'b' has 2 nodes, NETSTORM_NETWORK describes 3" in caplog.text
    assert [one.link_share for one in several.machine.snapshots(several.now)] == [1.0, 1.0]
    several.run(1.0)
    assert several.formations == []


def test_where_awareness_is_off_the_policy_that_a_job_began_under_stays(tmp_path):
    several = Several(**network(tmp_path), awareness=False)
    several.start("a", 3)
    several.start("b", 3)
    several.run(1.0)
    assert several.first_requests[-1].link_share == 0.5
    assert several.formations == []


def test_answers_go_to_the_job_that_has_asked(tmp_path):
    several = Several(**network(tmp_path))
    several.start("a", 3)
    several.start("b", 3)
    several.run(0.1)
    several.say("b/0", m.Failed(reason="x"))
    several.run(0.1)
    numbers = [one.number for one in several.formations]
    assert len(set(numbers)) == len(numbers)
    for question in several.formations:
        several.machine.policy_formed(form(question), several.now)
    awareness = several.machine.job("a").awareness
    assert awareness is not None
    assert not awareness.adaptation.forming
