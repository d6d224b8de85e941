"""Trainings over NetStorm give what they give over Gloo, with all that DDP can do; shards and checkpoints."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import training

ROUNDING = {"SGD": 1e-5, "AdamW": 2e-4}
"""Of parameters of about 1 after 50 steps; AdamW divides by the root of gradients that are almost 0."""


@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=pytest.mark.slow)])
def test_fifty_steps_end_as_over_gloo_to_rounding_and_with_the_same_bits_at_all_ranks(ranks, optimizer):
    ranks.start(training.fifty_steps, 4, optimizer=optimizer)
    for difference, same in ranks.answers():
        assert difference < ROUNDING[optimizer]
        assert same


def test_gradients_of_whole_numbers_are_those_of_gloo_bit_for_bit(ranks):
    ranks.start(training.whole_numbers, 4)
    assert ranks.answers() == [True] * 4


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


def test_pytorch_itself_has_no_synchronised_batch_norm_on_the_cpu(ranks):
    ranks.start(training.batch_norm, 2)
    assert ranks.answers() == ["SyncBatchNorm layers only work with GPU modules"] * 2
