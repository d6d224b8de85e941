"""Checkpoints of AsynchronousSGD: of all ranks together, or in elastic jobs of one while others go on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from netstorm.checkpoint.files import latest_step
from tests.integration.torch.elastic_ranks import ElasticRanks
from tests.integration.torch.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.slow,
]
if find_spec("torch") is not None:
    from tests.integration.torch.programs import asynchronous_checkpoints


def run(forker: Any, folder: Path, ranks: int, **arguments: Any) -> list[Any]:
    """Have some ranks train and save; return their answers."""
    folder.mkdir()
    with Ranks(forker, folder) as job:
        job.start(asynchronous_checkpoints.saved_together, ranks, **arguments)
        return job.answers()


def test_a_checkpoint_has_all_pushes_before_it_for_a_job_of_another_size(forker: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints")
    for answer in run(forker, tmp_path / "first", 3, path=path, steps=4, CHUNK_SIZE=100):
        assert answer["loaded"] is None
        assert answer["at_first"] == [0, 0]
        assert answer["at_last"] == pytest.approx([21, 21])
        assert "the checkpoint has nothing for parameter 'weight'" in answer["other_model"]
        assert "state= is none of AsynchronousSGD's" in answer["no_state"]
        assert "when it is made" in answer["late"]
    for answer in run(forker, tmp_path / "second", 2, path=path, steps=1, CHUNK_SIZE=300):
        assert answer["loaded"] == [0, 3, 4]
        assert answer["at_first"] == pytest.approx([12, 12])
        assert answer["at_last"] == pytest.approx([20, 20])


def train(forker: Any, folder: Path, path: str, last_step: int | None) -> int:
    """Train with three ranks. The first that writes dies, the next one goes on, and then one that joins.

    Return the last step that was written.
    """
    folder.mkdir()
    program = asynchronous_checkpoints.saved_by_one
    with ElasticRanks(forker, folder, begin=3, elastic="1:4", CHUNK_SIZE=500) as ranks:
        for rank in range(3):
            ranks.start(f"first {rank}", rank, program, path=path, number=rank)
        ranks.wait_until_said("first 0", "wrote")
        ranks.kill("first 0")
        ranks.wait_until_said("first 1", "wrote")
        ranks.start("back", 0, program, path=path, number=3)
        ranks.wait_until_said("back", "wrote")
        (folder / "end").touch()
        for number in (1, 2, 3):
            ranks.wait_until_there(f"ended {number}")
        (folder / "all ended").touch()
        answers = [ranks.answer(name) for name in ("first 1", "first 2", "back")]
        ranks.end()
    first, second, back = answers
    assert second["wrote"] == []
    written = first["wrote"] + back["wrote"]
    assert written == sorted(set(written))
    assert [answer["loaded"] for answer in answers] == [last_step, last_step, None]
    assert all("one rank writes alone" in answer["own"] for answer in answers)
    if last_step is not None:
        assert first["at_first"] == second["at_first"]
        assert first["at_first"][0] >= 5
    return int(written[-1])


def test_one_rank_writes_while_all_go_on_and_ranks_come_and_go(forker: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    step = None
    for job in ("first", "second"):
        step = train(forker, tmp_path / job, str(path), step)
        assert latest_step(path) == step
