"""DDP's communication hooks over a process group beside DDP's own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.integration.torch.local_updates import task
from tests.integration.torch.local_updates.rank_pool import RankPool

pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.integration.torch.local_updates import programs


@pytest.mark.parametrize("own_group", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_hook_gives_what_ddp_gives_bit_for_bit(pool: RankPool, own_group):
    expected = pool.run(programs.ddp, 3, hook=None, steps=5)

    found = pool.run(programs.ddp, 3, hook="netstorm", steps=5, own_group=own_group)

    for one, other in zip(found, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("hook", "precision"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_a_compressed_bucket_is_rounded_to_its_type(pool: RankPool, hook, precision):
    expected = pool.run(programs.ddp, 3, hook=None, steps=1)

    found = pool.run(programs.ddp, 3, hook=hook, steps=1)

    differences = [np.abs(a - b).max() for a, b in zip(found[0], expected[0], strict=True)]
    assert 0 < max(differences) < 20 * precision * task.LEARNING_RATE
    assert all(np.array_equal(a, b) for values in found for a, b in zip(values, found[0], strict=True))
