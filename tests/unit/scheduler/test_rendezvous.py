"""Nodes come, wait for each other, get ranks, or are refused by name."""

from __future__ import annotations

import pytest

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.pslite.machine import Admit
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import Driven, refusal, refused, running, star


def test_once_all_are_here_asked_ranks_are_honoured_and_others_get_the_lowest_in_order_of_arrival():
    driven = Driven(5)
    for number, (name, rank) in enumerate([("a", -1), ("b", 3), ("c", -1), ("d", 0), ("e", -1)]):
        assert driven.sent == {}, "nobody is told anything before"
        driven.hello(name, incarnation=70 + number)
        driven.join(name, rank)
    assert {name: driven.heard(name)[0].rank for name in "abcde"} == {"a": 1, "b": 3, "c": 2, "d": 0, "e": 4}
    assert [member.incarnation for member in driven.machine.members] == [73, 70, 72, 71, 74]


def test_joined_carries_all_that_a_node_needs():
    driven = Driven(2, heartbeat_interval_s=0.5, heartbeat_timeout_s=5.0)
    driven.join("a", site="denver", port=4242)
    driven.join("b")
    (joined,) = driven.heard("b")
    assert joined.rank == 1
    assert [(one.rank, one.host, one.port, one.site) for one in joined.members] == [
        (0, "a", 4242, "denver"),
        (1, "b", 4000, ""),
    ]
    assert joined.policy == star(2, version=1)
    assert (joined.heartbeat_interval_s, joined.heartbeat_timeout_s) == (0.5, 5.0)
    assert driven.machine.phase is JobPhase.RUNNING


def test_waiting_is_said_every_few_seconds_with_who_is_here_and_who_is_not():
    driven = Driven(4)
    driven.join("10.0.0.7", 2, site="denver")
    driven.join("10.0.0.8", 0)
    driven.run(7)
    said = driven.heard("10.0.0.7", m.Waiting)
    assert len(said) == 2
    assert said[0].text == (
        "waiting for 2 of 4 nodes; here: 2 (10.0.0.7:4000, denver), 0 (10.0.0.8:4000); not here: 1, 3"
    )


def test_a_node_without_an_asked_rank_is_listed_as_any(caplog):
    caplog.set_level("INFO", "netstorm.scheduler")
    driven = Driven(3)
    driven.run(4)
    driven.join("a")
    driven.run(4)
    assert "waiting for 3 of 3 nodes; nobody is here yet" in caplog.messages
    assert "waiting for 2 of 3 nodes; here: any (a:4000)" in caplog.messages


def test_a_waiting_line_names_only_some_of_very_many_nodes():
    driven = Driven(41)
    for index in range(40):
        driven.join(f"h{index}")
    text = driven.machine.status_text()
    assert text.startswith("waiting for 1 of 41 nodes; here: any (h0:4000), ")
    assert text.endswith("any (h31:4000) and 8 more")


# ---------------------------------------------------------------------------------------------- refusals


def beats(driven, name, seconds):
    for _ in range(seconds):
        driven.run(1)
        driven.say(name, m.Heartbeat())
    driven.run(1)


def test_the_second_of_two_that_ask_for_one_rank_is_refused_by_name_of_both():
    driven = Driven(3)
    driven.join("a", 1, site="denver")
    driven.join("b", 1)
    beats(driven, "a", 2)
    assert refusal(driven, "b") == (
        "the node at b:4000 asks for rank 1, which the node at a:4000, denver has: NETSTORM_RANK must "
        "differ from "
        "node to node, or be -1 for any"
    )
    driven.forget()
    driven.join("c", 0)
    driven.join("d", 2)
    assert [member.host for member in driven.machine.members] == ["c", "a", "d"]


def test_a_refused_node_holds_no_place_and_one_that_asks_twice_counts_once():
    driven = Driven(2)
    driven.join("a", release="0.9")
    driven.join("b")
    driven.join("b")
    assert "waiting for 1 of 2 nodes" in driven.machine.status_text()
    driven.join("c")
    assert [member.host for member in driven.machine.members] == ["b", "c"]


def test_a_policy_for_another_number_of_nodes_is_a_usage_error():
    with pytest.raises(UsageError, match="a policy for 4 nodes in a job of 3"):
        SchedulerMachine(SchedulerOptions(num_workers=3), star(4), now=0.0)


# ------------------------------------------------------------------------------------- coming and going


@pytest.mark.parametrize("word", [m.Leave(), m.Failed(reason="Ctrl-C"), "lost", "silent"], ids=str)
def test_a_node_that_goes_before_all_are_here_frees_its_place(caplog, word):
    driven = Driven(2, heartbeat_timeout_s=10.0)
    driven.join("a", 0)
    driven.say("a", m.Heartbeat())
    if word == "lost":
        driven.lose("a", "the connection is gone")
        assert "the node at a:4000 has gone before all were here: the connection is gone" in caplog.messages
    elif word == "silent":
        driven.run(10.5)
        assert driven.machine.status_text() == "waiting for 2 of 2 nodes; nobody is here yet"
    else:
        driven.say("a", word)
    driven.join("b", 0)
    driven.join("c", 1)
    assert [member.host for member in driven.machine.members] == ["b", "c"]


def test_a_restarted_process_takes_the_place_of_the_one_that_was_at_its_address():
    driven = Driven(2)
    driven.join("a", 0)
    driven.join("restarted", 0, host="a")
    assert driven.gone("a").reason == "another process has come as the node at a:4000"
    driven.join("b", 1)
    assert driven.machine.members[0].incarnation != 0
    assert driven.heard("restarted", m.Joined)[0].rank == 0


def test_two_living_nodes_at_one_address_are_a_mistake_that_names_the_settings():
    driven = Driven(2)
    driven.join("a", 0)
    driven.say("a", m.Heartbeat())
    driven.join("other", 1, host="a")
    beats(driven, "a", 2)
    assert refusal(driven, "other") == (
        "two nodes say that they are at a:4000: give each an address of its own (DMLC_NODE_HOST, "
        "NETSTORM_PORT, "
        "NETSTORM_ADVERTISED_PORT)"
    )


def test_a_rank_whose_holder_fell_silent_can_be_taken_over():
    driven = Driven(2)
    driven.join("a", 0)
    driven.say("a", m.Heartbeat())
    driven.run(4)
    driven.join("b", 0)
    assert driven.gone("a").reason == "rank 0 was given to the node at b:4000: yours fell silent"
    assert "here: 0 (b:4000)" in driven.machine.status_text()


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_process_that_is_started_again_at_once_waits_until_the_one_before_has_fallen_silent(host):
    driven = Driven(3)
    driven.join("a", 0)
    driven.join("c", 1)
    driven.say("a", m.Heartbeat())
    driven.run(0.5)
    driven.join("again", 0, host=host)
    driven.join("d", 2)
    assert driven.machine.phase is JobPhase.GATHERING
    assert "asks for the place of one that may have died" in driven.machine.status_text()
    driven.run(4)
    assert driven.gone("a").kind == "refused"
    assert driven.heard("again", m.Joined)[0].rank == 0
    assert [member.host for member in driven.machine.members] == [host, "c", "d"]


def test_a_process_that_is_started_again_takes_the_place_at_once_when_the_one_before_leaves():
    driven = Driven(2)
    driven.join("a", 0)
    driven.say("a", m.Heartbeat())
    driven.join("again", 0)
    driven.say("a", m.Leave())
    driven.run(1)
    driven.join("c", 1)
    assert driven.heard("again", m.Joined)[0].rank == 0


def test_a_node_in_doubt_that_goes_away_leaves_the_place_to_the_one_that_has_it():
    driven = Driven(2)
    driven.join("a", 0)
    driven.say("a", m.Heartbeat())
    driven.join("again", 0)
    driven.lose("again")
    driven.join("c", 1)
    assert [member.host for member in driven.machine.members] == ["a", "c"]


def test_a_member_that_could_not_read_that_it_joined_is_told_again_with_all_policies():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(m.KeySpec(0, "w", (4,), "float32"),)))
    driven.install(star(2, version=2))
    driven.forget()
    driven.join("n1", 1)
    joined, newer = driven.heard("n1")
    assert (joined.rank, joined.policy.version, newer.policy.version) == (1, 1, 2)


def test_join_timeout_tells_everybody_who_is_missing_and_ends_with_a_failure():
    driven = Driven(3, join_timeout_s=9.0)
    driven.join("a", 0)
    driven.join("b", 2)
    driven.run(8)
    driven.forget()
    driven.run(2)
    for name in "ab":
        gone = driven.gone(name)
        assert gone.kind == "timeout"
        assert gone.reason == (
            "not every node came within 9 s (NETSTORM_JOIN_TIMEOUT): waiting for 1 of 3 nodes; here: 0 "
            "(a:4000), "
            "2 (b:4000); not here: 1"
        )
        driven.say(name, m.Leave())
    driven.run(0.1)
    assert driven.exit_code() == 1


def test_a_process_that_has_not_joined_can_do_nothing_else():
    driven = Driven(2)
    driven.hello("a")
    with pytest.raises(ProtocolViolation, match="has not joined sent a Barrier"):
        driven.say("a", m.Barrier(number=0))


@pytest.mark.parametrize(("first", "second"), [("127.0.0.1", "10.0.0.2"), ("10.0.0.1", "::1")])
def test_a_node_on_loopback_and_one_of_another_machine_are_not_in_one_job(first, second):
    driven = Driven(2)
    driven.join(first, 0, machine=1)
    driven.join(second, 1, machine=2)
    reason = refusal(driven, second)
    assert "can be reached on its own machine alone" in reason
    assert "set DMLC_NODE_HOST" in reason


@pytest.mark.parametrize("machine", [1, 0])
def test_nodes_of_one_machine_or_of_unknown_ones_may_be_on_loopback(machine):
    driven = Driven(2)
    driven.join("127.0.0.1", 0, machine=1, must_agree={"CHUNK_SIZE": "65536"})  # as at the scheduler
    driven.join("10.0.0.2", 1, machine=machine)
    assert driven.machine.phase is JobPhase.RUNNING


# ----------------------------------------------------------------------- which requests to join are refused


@pytest.mark.parametrize(
    "fields",
    [{"host": ""}, {"host": "a b"}, {"host": "x" * 256}, {"port": 0}, {"port": 65_536}, {"site": "a\nb"}],
)
def test_an_address_that_nobody_can_use_is_refused(fields):
    driven = Driven(3)
    driven.join("a", **fields)
    reason = refusal(driven, "a")
    assert reason.startswith("a node says that it can be reached at host ")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(
            (
                {"rank": rank},
                (
                    f"the node at a:4000 asks for rank {rank} (NETSTORM_RANK) in a job of 3 nodes (the "
                    "scheduler's DMLC_NUM_WORKER): ranks are 0 to 2, or -1 for any"
                ),
            )
            for rank in (3, -2)
        ),
        (
            {"num_workers": 4},
            (
                "the node at a:4000 was started with DMLC_NUM_WORKER=4, the scheduler with DMLC_NUM_WORKER=3:"
                " give both the same number of nodes"
            ),
        ),
        (
            {"release": "0.9"},
            "the node at a:4000 runs NetStorm 0.9, the scheduler 1.2.3: install the same release everywhere",
        ),
        (
            {"must_agree": {"CHUNK_SIZE": "1000", "NETSTORM_TOPOLOGY": "star"}},
            (
                "CHUNK_SIZE=1000 at the node at a:4000, 65536 at the scheduler; NETSTORM_TOPOLOGY=star at "
                "the node at a:4000, fapt at the scheduler: this holds for the whole job; set it at the "
                "scheduler, and at nodes to the same or not at all"
            ),
        ),
        (
            {"job": "resnet"},
            (
                "the node at a:4000 is of job 'resnet', the scheduler of job 'alexnet': give both the same "
                "NETSTORM_JOB, or the node another DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            ),
        ),
    ],
)
def test_a_node_that_is_not_of_this_job_is_refused_naming_both_sides(fields, reason):
    driven = Driven(3)
    driven.join("a", **fields)
    assert refusal(driven, "a") == reason


def test_one_node_too_many_is_refused_and_the_job_goes_on():
    driven = running(2)
    driven.join("late")
    assert refusal(driven, "late") == (
        "job 'alexnet' has all its 2 nodes (rank 0 (n0:4000, site0), rank 1 (n1:4000, site1)); the node "
        "at late:4000 is one too many: start as many nodes as the scheduler's DMLC_NUM_WORKER says"
    )
    driven.join("again", 1)
    assert "if it is rank 1, started again" in refusal(driven, "again")
    assert driven.sent == {}
    assert driven.machine.phase is JobPhase.RUNNING


def test_a_late_node_of_a_failed_job_hears_why_it_failed():
    driven = running(2)
    driven.say(1, m.Failed(reason="ValueError: no data"))
    driven.join("late")
    assert "already ended: rank 1 (n1:4000, site1) failed: ValueError: no data" in refusal(driven, "late")


def test_a_job_is_reproducible_if_the_scheduler_or_one_node_asks_for_it():
    for scheduler, node in ((True, {}), (False, {"NETSTORM_REPRODUCIBLE": "True"}), (False, {})):
        driven = Driven(2, reproducible=scheduler)
        driven.join("a")
        driven.join("b", must_agree=node)
        assert driven.heard("a")[0].reproducible == (scheduler or bool(node))


def test_nodes_that_disagree_about_reproducible_results_are_refused_by_name():
    driven = Driven(2)
    driven.join("a", must_agree={"NETSTORM_REPRODUCIBLE": "True"})
    driven.join("b", must_agree={"NETSTORM_REPRODUCIBLE": "False"})
    assert refusal(driven, "b") == (
        "the node at b:4000 has NETSTORM_REPRODUCIBLE=0, the node at a:4000 NETSTORM_REPRODUCIBLE=1: this "
        "holds for the whole job"
    )
    elastic = Driven(2, elastic=(1, 2))
    elastic.join("a", must_agree={"NETSTORM_REPRODUCIBLE": "True"})
    assert "NETSTORM_REPRODUCIBLE=1, the scheduler NETSTORM_ELASTIC" in refusal(elastic, "a")


# -------------------------------------------------------------------- processes are numbered by incarnation


def test_the_same_incarnation_is_the_same_peer_and_another_one_is_somebody_else():
    driven = Driven(3)
    first = driven.hello("a", incarnation=5)
    assert driven.hello("a", incarnation=5) == first
    assert driven.hello("b", incarnation=6) != first


def test_a_hello_meant_for_a_rank_is_refused():
    driven = Driven(3)
    hello = m.Hello(job="alexnet", sender=0, incarnation=1, receiver=2, session=1, received=0)
    assert refused(driven.machine.admit(hello)) == "this is the scheduler of job 'alexnet', not rank 2"


def test_a_rank_of_an_earlier_scheduler_is_refused():
    driven = Driven(3)
    assert "does not know this rank 1" in refused(driven.hello("a", sender=1))


def test_a_flood_of_unknown_processes_is_forgotten_but_members_that_reconnect_are_known():
    driven = running(2)
    peer = driven.peer_of(0)
    first = driven.hello("unknown", incarnation=10**9)
    assert driven.hello("unknown", incarnation=10**9) == first
    for incarnation in range(10_010):
        driven.hello("unknown", incarnation=2 * 10**9 + incarnation)
    assert driven.hello("unknown", incarnation=10**9) != first
    incarnation = driven.machine.members[0].incarnation
    assert driven.hello("n0", incarnation=incarnation, sender=0) == Admit(peer)
