"""`torch.use_deterministic_algorithms(True)`: a program's bits are the same in each run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.forking import Forker
from tests.integration.torch.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import reproducible as programs


def test_two_runs_end_with_the_same_bits_though_other_ranks_are_late(forker: Forker, tmp_path: Path) -> None:
    runs = []
    for backwards in (False, True):
        folder = tmp_path / str(backwards)
        folder.mkdir()
        with Ranks(forker, folder) as ranks:
            ranks.start(programs.train, 4, backwards=backwards)
            runs.append(ranks.answers())
    for first, second in zip(*runs, strict=True):
        assert first["digest"] == second["digest"]
        for said, what in zip(first["refused"], ("AsynchronousSGD", "the codec 'auto'"), strict=True):
            assert f"{what} with NETSTORM_REPRODUCIBLE=1: expected one of them" in said


def test_what_cannot_be_reproduced_is_refused_with_what_asks_for_it(ranks: Ranks) -> None:
    ranks.start(programs.refused, 1, NETSTORM_LOSS_BOUND=0.1)
    [said] = ranks.answers()
    assert "NETSTORM_REPRODUCIBLE=1 with NETSTORM_LOSS_BOUND=0.1: expected one of them" in said
    assert "PyTorch's use_deterministic_algorithms(True) sets the former" in said
