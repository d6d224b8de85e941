"""PyTorch's own checkpoints over NetStorm's default group: DCP, FSDP, states of rank 0, saves in a thread."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import pytorch_checkpoints


def test_a_training_is_saved_and_resumed_by_all_of_pytorchs_own_calls(ranks):
    ranks.start(pytorch_checkpoints.state_dicts, 2, folder=str(ranks.folder))
    for answer in ranks.answers():
        assert dict.fromkeys(answer, "") == answer


def test_saves_in_a_thread_over_the_default_group_go_on_beside_training_over_it(ranks):
    ranks.start(pytorch_checkpoints.save_while_training, 2, folder=str(ranks.folder), saves=3)
    assert ranks.answers() == [[], []]
