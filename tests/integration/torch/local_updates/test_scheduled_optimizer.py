"""Sums that overlap with the next forward pass, in real processes."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.integration.torch.elastic_ranks import ElasticRanks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs.scheduled import failures, models, overlap


@pytest.mark.slow
def test_parameters_have_the_bits_of_ddp_and_the_whole_optimiser(ranks):
    ranks.start(overlap.beside_ddp, 2)
    for answer in ranks.answers():
        assert answer["differing"] == []
        assert answer["same"] is True
        assert answer["early"].startswith("UsageError: step() without a backward pass")


def test_the_next_forward_pass_begins_before_the_last_layers_sum_is_there(ranks):
    ranks.start(overlap.next_forward, 2)
    assert ranks.answers() == [[False, False], []]


@pytest.mark.slow
def test_models_of_all_kinds_get_the_bits_of_a_plain_loop(ranks):
    ranks.start(models.beside_a_plain_loop, 2)
    for answer in ranks.answers():
        assert answer == {name: [] for name in models._CASES}


def test_training_goes_on_from_what_was_saved_right_after_a_step(ranks):
    ranks.start(failures.saved_and_resumed, 2)
    for answer in ranks.answers():
        assert [what for what, holds in answer.items() if not holds] == []


def test_steps_that_fail_or_are_left_out_leave_no_trace(ranks):
    ranks.start(failures.left_out, 2)
    for answer in ranks.answers():
        failed, early, second, forward = answer["errors"]
        assert "in the midst of a backward pass" in failed
        assert early.startswith("UsageError: step() without a backward pass")
        assert second.startswith("UsageError: a second backward pass before step()")
        assert forward.startswith("RuntimeError")
        assert (answer["same"], answer["ranks"]) == (True, True)


def test_what_cannot_work_is_refused_and_the_ways_around_it_work(ranks):
    ranks.start(failures.refused, 2)
    for answer in ranks.answers():
        said = {
            "functional": "its module has not been called since the last step: name the class",
            "twice": "the model has a ScheduledOptimizer already",
            "ddp": "a model in DistributedDataParallel",
            "frozen": "has no parameters that need a gradient",
            "other optimizer": "expected an optimizer of exactly the model's trained parameters",
            "its own step": "call the step() of ScheduledOptimizer",
            "second": "a second backward pass before step()",
            "added": "the optimizer has got other parameters",
            "sparse": "has a sparse gradient",
            "counting": "_Counting changes 'count' of its parameter groups",
        }
        for what, words in said.items():
            assert words in answer[what], what
        assert answer["closed"] == "True"
        assert all(answer["ways"])


def test_a_rank_that_fails_in_its_backward_pass_is_named_at_the_others(ranks):
    ranks.start(failures.rank_fails, 2)
    assert all(ranks.end(rank).code for rank in range(2))  # the job has failed
    error = json.loads((ranks.folder / "answer0").read_text())
    assert error.startswith("NodeFailed")
    assert "in the midst of a backward pass" in error


def test_an_elastic_job_is_refused(forker, tmp_path):
    with ElasticRanks(forker, tmp_path, begin=1, elastic="1:2") as job:
        job.start("only", 0, failures.elastic_job)
        assert "ScheduledOptimizer in an elastic job (NETSTORM_ELASTIC)" in job.answer("only")
        job.end()
