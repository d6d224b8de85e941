"""Asynchronous SGD in real processes: what owners apply, and by what gradients are corrected."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import local_averages

RANKS = 3


def expected(lamda: float, momentum: float) -> Any:
    """Return the values after all steps, by the paper's algorithm 2."""
    value: Any = np.linspace(-1, 1, 1001)
    backups, velocity = [value.copy() for _ in range(RANKS)], np.zeros(1001)
    for step in range(4):
        for rank in range(RANKS):
            if (step + rank) % 3:
                gradient = np.linspace(-1 - step, 1 + rank, 1001)
                corrected = gradient + lamda * gradient**2 * (value - backups[rank])
                velocity = momentum * velocity - 0.25 * corrected
                value = value + velocity
                backups[rank] = value.copy()
    return value


@pytest.mark.parametrize(("lamda", "momentum"), [(0.5, 0.5)])
def test_gradients_are_corrected_by_what_their_own_rank_has_pulled(ranks, lamda, momentum):
    ranks.start(local_averages.asynchronous, RANKS, lamda=lamda, momentum=momentum, CHUNK_SIZE=100)
    for answer in ranks.answers():
        assert answer["same"] is True
        np.testing.assert_allclose(answer["values"], expected(lamda, momentum), rtol=1e-6, atol=1e-6)


def test_ranks_train_without_waiting_and_have_the_same_parameters_in_the_end(ranks):
    ranks.start(local_averages.descending, RANKS)
    for answer in ranks.answers():
        assert answer["last"] < answer["first"] / 3
        assert answer["same"] is True
        assert [error.partition(":")[0] for error in answer["refused"]] == ["UsageError", "UsageError"]
