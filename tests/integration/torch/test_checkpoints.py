"""PyTorch jobs save checkpoints in shares, are killed, and go on, also with another number of ranks."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.forking import Forker
from tests.integration.torch.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import checkpoints

STEPS, SAVED = 6, 2


def run(forker: Forker, folder: Path, count: int, **arguments: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    with Ranks(forker, folder) as ranks:
        ranks.start(checkpoints.train, count, steps=STEPS, **arguments)
        return ranks.answers()


def test_a_job_that_was_killed_goes_on_bit_for_bit_from_its_checkpoint(forker: Forker, tmp_path: Path):
    path = str(tmp_path / "checkpoints")
    (tmp_path / "killed").mkdir()
    with Ranks(forker, tmp_path / "killed") as ranks:  # two: sums of three differ from run to run
        ranks.start(checkpoints.train, 2, path=path, steps=STEPS, save_at=SAVED)
        for rank in range(2):
            ranks.wait_until_said(rank, "are the digests")
        for rank in range(2):
            ranks.send(rank, signal.SIGKILL)
        undisturbed = json.loads(ranks.end(0).out.partition(" are")[0])
    assert len(set(undisturbed)) == STEPS

    expected = {"first": SAVED + 1, "own": True, "digests": undisturbed[SAVED + 1 :]}
    assert run(forker, tmp_path / "again", 2, path=path) == [expected, expected]

    (alone,) = run(forker, tmp_path / "alone", 1, path=path)
    assert (alone["first"], alone["own"]) == (SAVED + 1, False)
    assert len(alone["digests"]) == STEPS - SAVED - 1


def test_pytorchs_own_checkpoint_calls_and_safetensors_read_a_checkpoint(ranks: Ranks, tmp_path: Path):
    ranks.start(checkpoints.read_by_others, 2, path=str(tmp_path / "checkpoints"))
    for answer in ranks.answers():
        assert answer == {"dcp": [], "safetensors": [], "files": [], "netstorm": [], "own": []}


def test_what_goes_wrong_is_said_at_every_rank(ranks: Ranks, tmp_path: Path):
    ranks.start(checkpoints.misuse, 2, path=str(tmp_path / "checkpoints"))
    first, second = ranks.answers()
    for found in (first, second):
        assert "rank 0 and rank 1 give different numbers or texts" in found["plain"]
        assert found["plain"].startswith("Disagreement")
        assert "tensors of different names, shapes or types" in found["shapes"]
        assert "step is 0 at rank 0 and 1 at rank 1" in found["step"]
        assert "weight is a sparse" in found["sparse"]
        assert "own= needs shares=True" in found["own"]
        assert "keep=0: expected at least 1" in found["keep"]
        assert "has no checkpoint" in found["none"]
        assert found["apart"].startswith("WaitTimeout")
        assert found["sent"] == 499500
        assert found["mean"] == [0, 0, 0]
    assert "no share of rank 1" in first["apart"]
    assert "use shares=False" in first["apart"]
    assert "rank 1 cannot read the checkpoint" in first["alone"]
    assert "does not exist" in second["alone"]
