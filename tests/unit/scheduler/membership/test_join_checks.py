"""Which requests to join are refused, and that the reason names both sides."""

from __future__ import annotations

import pytest

from netstorm.protocol import messages as m
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import Driven, refusal, running


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


@pytest.mark.parametrize("rank", [3, -2])
def test_a_rank_out_of_range_is_refused(rank):
    driven = Driven(3)
    driven.join("a", rank)
    assert refusal(driven, "a") == (
        f"the node at a:4000 asks for rank {rank} (NETSTORM_RANK) in a job of 3 nodes (the scheduler's "
        "DMLC_NUM_WORKER): "
        "ranks are 0 to 2, or -1 for any"
    )


def test_another_number_of_nodes_is_refused_naming_both_sides():
    driven = Driven(3)
    driven.join("a", num_workers=4)
    assert refusal(driven, "a") == (
        "the node at a:4000 was started with DMLC_NUM_WORKER=4, the scheduler with DMLC_NUM_WORKER=3: "
        "give both the "
        "same number of nodes"
    )


def test_another_release_is_refused_naming_both_sides():
    driven = Driven(3)
    driven.join("a", release="0.9")
    assert refusal(driven, "a") == (
        "the node at a:4000 runs NetStorm 0.9, the scheduler 1.2.3: install the same release everywhere"
    )


def test_a_job_wide_setting_that_differs_is_refused_naming_both_sides():
    driven = Driven(3)
    driven.join("a", must_agree={"CHUNK_SIZE": "1000", "NETSTORM_TOPOLOGY": "star"})
    assert refusal(driven, "a") == (
        "CHUNK_SIZE=1000 at the node at a:4000, 65536 at the scheduler; NETSTORM_TOPOLOGY=star at the "
        "node at a:4000, "
        "fapt at the scheduler: this holds for the whole job; set it at the scheduler, and at nodes to "
        "the same or "
        "not at all"
    )


def test_job_wide_settings_that_agree_are_no_obstacle():
    driven = Driven(1)
    driven.join("a", must_agree={"CHUNK_SIZE": "65536"})
    assert driven.machine.phase is JobPhase.RUNNING


def test_a_node_of_another_job_is_refused_naming_both():
    driven = Driven(2)
    driven.join("a", job="resnet")
    assert refusal(driven, "a") == (
        "the node at a:4000 is of job 'resnet', the scheduler of job 'alexnet': give both the same "
        "NETSTORM_JOB, or the "
        "node another DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
    )


def test_one_node_too_many_is_refused_and_the_job_goes_on():
    driven = running(2)
    driven.join("late")
    assert refusal(driven, "late") == (
        "job 'alexnet' has all its 2 nodes (rank 0 (n0:4000, site0), rank 1 (n1:4000, site1)); the node "
        "at late:4000 is "
        "one too many: start as many nodes as the scheduler's DMLC_NUM_WORKER says"
    )
    assert driven.sent == {}
    assert driven.machine.phase is JobPhase.RUNNING


def test_a_late_node_of_a_failed_job_hears_why_it_failed():
    driven = running(2)
    driven.say(1, m.Failed(reason="ValueError: no data"))
    driven.join("late")
    assert "already ended: rank 1 (n1:4000, site1) failed: ValueError: no data" in refusal(driven, "late")


def test_a_process_that_is_started_again_after_the_job_began_hears_what_to_do():
    driven = running(2)
    driven.join("again", 1)
    assert "if it is rank 1, started again" in refusal(driven, "again")


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
