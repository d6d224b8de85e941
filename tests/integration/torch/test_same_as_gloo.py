"""Trainings over NetStorm give what they give over Gloo, with all that DDP can do; shards and checkpoints."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import training

ROUNDING = {"SGD": 1e-5, "AdamW": 2e-4}
"""Of parameters of about 1 after 50 steps; AdamW divides by the root of gradients that are almost 0."""


def test_fifty_steps_end_as_over_gloo_with_the_same_bits_at_all_ranks_and_sums_of_whole_numbers_are_gloos(
    ranks,
):
    ranks.start(training.like_gloo, 4)
    for steps, whole_numbers_are_the_same, of_batch_norm in ranks.answers():
        for optimizer, (difference, same) in steps.items():
            assert difference < ROUNDING[optimizer]
            assert same
        assert whole_numbers_are_the_same
        # PyTorch itself has no synchronised batch norm on the CPU.
        assert of_batch_norm == "SyncBatchNorm layers only work with GPU modules"


@pytest.mark.slow
def test_all_that_ddp_can_do_gives_what_it_gives_over_gloo(ranks):
    ranks.start(training.features, 3)
    assert ranks.answers() == [[]] * 3


@pytest.mark.slow
def test_fsdp_trains_as_one_process_does_and_its_checkpoint_can_be_loaded(ranks, tmp_path):
    ranks.start(training.shards, 3, folder=str(tmp_path / "checkpoint"))
    assert ranks.answers() == [[]] * 3


@pytest.mark.slow
def test_functional_collectives_are_right_compiled_or_not(ranks):
    ranks.start(training.functional, 3)
    assert ranks.answers() == [[]] * 3
