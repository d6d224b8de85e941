"""Checkpoints of AsynchronousSGD: of all ranks together, or in elastic jobs of one while others go on.

With a momentum of 1/2 and gradients of -1 a value and its momentum are 2n together after n pushes. So a state
tells whether all that is in it is of the same moment.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.checkpoint.files import latest_step
from netstorm.frontends.torch import checkpoint, elastic
from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from tests.integration.torch.begin import PATIENCE, begin, error_of
from tests.integration.torch.elastic_ranks import ElasticRanks
from tests.integration.torch.ranks import Ranks

pytestmark = pytest.mark.slow


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(700, 4, dtype=torch.float64))
        self.small = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.single = nn.Parameter(torch.zeros(3, dtype=torch.float32))


def _make(path: str, *, newcomer: bool = False) -> tuple[_Weights, AsynchronousSGD, Any]:
    """Return a model in training, and what it has loaded."""
    model = _Weights()
    loaded = None if newcomer else checkpoint.load(path, missing_ok=True)
    state = None if loaded is None else loaded.state["training"]
    return model, AsynchronousSGD(model, lr=1.0, momentum=0.5, lamda=0.0, state=state), loaded


def _step(model: _Weights, training: AsynchronousSGD, gradient: float = -1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    training.step()


def _pushes(state: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the largest number of pushes in a state, by its values and momenta."""
    pushes = [(value + state["momenta"][name]).double() / 2 for name, value in state["parameters"].items()]
    for one in pushes:
        assert (one - one.round()).abs().max() < 1e-4, one
    largest = max(float(one.max()) for one in pushes)
    assert round(largest) == state["updates"].max()
    return min(float(one.min()) for one in pushes), largest


def saved_together(path: str, job: str) -> None:
    """Train, save, and train on, as the first job of three ranks and as the second one of two."""
    begin()
    steps, at_first, at_last = {"first": (4, 0, 21), "second": (1, 12, 20)}[job]
    model, training, loaded = _make(path)
    assert _pushes(training.state_dict()) == pytest.approx((at_first, at_first))
    if job == "second":
        assert loaded is not None
        assert (loaded.step, loaded.world_size, loaded.state["steps"]) == (0, 3, 4)
    for _ in range(steps):
        _step(model, training)
    checkpoint.save(path, {"training": training, "steps": steps}, keep=1).wait(60)
    for _ in range(3):
        _step(model, training)
    dist.barrier()
    assert _pushes(training.state_dict()) == pytest.approx((at_last, at_last))
    saved = checkpoint.load(path)
    assert saved is not None
    other = error_of(AsynchronousSGD, nn.Linear(2, 2), 0.1, state=saved.state["training"])
    assert "the checkpoint has nothing for parameter 'weight'" in other
    assert "state= is none of AsynchronousSGD's" in error_of(
        AsynchronousSGD, model, 0.1, state={"parameters": {}}
    )
    assert "when it is made" in error_of(training.load_state_dict, {})
    dist.destroy_process_group()


def test_a_checkpoint_has_all_pushes_before_it_for_a_job_of_another_size(forker: Any, tmp_path: Path) -> None:
    for job, count, chunk_size in (("first", 3, 100), ("second", 2, 300)):
        (tmp_path / job).mkdir()
        with Ranks(forker, tmp_path / job) as ranks:
            ranks.start(saved_together, count, path=f"{tmp_path}/checkpoints", job=job, CHUNK_SIZE=chunk_size)
            ranks.answers()


def saved_by_one(folder: str, path: str, number: int) -> dict[str, Any]:
    """Train in an elastic job until the file "end" is there, and save after every fifth step.

    Args:
        folder: of the job.
        path: of the checkpoints.
        number: of this process.
    """
    elastic.init_process_group(PATIENCE)
    model, training, loaded = _make(path, newcomer=elastic.is_newcomer())
    at_first = None
    if loaded is not None:
        at_first = _pushes(training.state_dict())
        dist.barrier()  # nobody pushes before all have read what was loaded
    wrote = []
    while not (Path(folder) / "end").exists():
        _step(model, training)
        if training.steps % 5 == 0:
            state = {"training": training, "steps": training.steps, "by": number}
            saving = checkpoint.save(path, state, step=training.steps, keep=2)
            if saving.wait(60) != Path(path):
                wrote.append(saving.step)
                print("wrote", saving.step, flush=True)
    (Path(folder) / f"ended {number}").touch()
    while not (Path(folder) / "all ended").exists():
        time.sleep(0.02)
    own = error_of(lambda: checkpoint.save(path, {"training": training}, own={}))
    dist.destroy_process_group()
    step = None if loaded is None else loaded.step
    return {"wrote": wrote, "loaded": step, "at_first": at_first, "own": own}


def train(forker: Any, folder: Path, path: str, last_step: int | None) -> int:
    """Train with three ranks. The first that writes dies, the next one goes on, and then one that joins.

    Return the last step that was written.
    """
    folder.mkdir()
    with ElasticRanks(forker, folder, begin=3, elastic="1:4", CHUNK_SIZE=500) as ranks:
        for rank in range(3):
            ranks.start(f"first {rank}", rank, saved_by_one, path=path, number=rank)
        ranks.wait_until_said("first 0", "wrote")
        ranks.kill("first 0")
        ranks.wait_until_said("first 1", "wrote")
        ranks.start("back", 0, saved_by_one, path=path, number=3)
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
