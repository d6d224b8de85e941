"""DiLoCo whose sums wait for a quorum: what is late counts later, and ranks that are behind come up again."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.local_updates import DiLoCo
from tests.integration.torch.begin import PATIENCE, begin, digest, error_of, same_at_all_ranks, store
from tests.integration.torch.elastic_ranks import ElasticRanks
from tests.integration.torch.ranks import on_ranks

SLOW, STEPS = 2, 40


class Trained:
    """One training: each step of each rank adds 1 to all parameters, and so do averages, by their steps."""

    def __init__(self, sync_every: int, *, grace: float = 0.05, **settings: Any) -> None:
        self.model = nn.Linear(300, 40)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        outer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.diloco = DiLoCo([self.model], self.inner, outer, sync_every, quorum=2, grace=grace, **settings)
        self.steps = 0
        """Steps that this rank has taken."""

    def run(self, rank: int, key: str) -> None:
        """Train; the slow rank takes its second step when the others have had two averages without it."""
        with self.diloco:
            while self.diloco.steps < STEPS:
                if rank == SLOW and self.steps == 1:
                    store().wait([key], PATIENCE)
                for parameter in self.model.parameters():
                    parameter.grad = torch.full_like(parameter, -1.0)
                self.inner.step()
                self.steps += 1
                if rank == 0 and self.diloco.steps >= 2 * self.diloco.state_dict()["settings"]["sync_every"]:
                    store().set(key, "")
            self.diloco.load_global_parameters()


@on_ranks(3)
def test_no_step_of_a_late_rank_is_lost_and_it_leaves_some_out() -> None:
    rank, ranks = begin()
    trained = Trained(2)
    trained.run(rank, "without delay")
    assert same_at_all_ranks(trained.model.parameters())
    [fragment] = trained.diloco.state_dict()["fragments"]
    uncounted = -ranks * fragment["kept"][0]  # outer gradients point against what was learnt
    taken = torch.full_like(uncounted, trained.steps)
    dist.all_reduce(uncounted)
    dist.all_reduce(taken)
    counted = ranks * torch.cat([parameter.detach().reshape(-1) for parameter in trained.model.parameters()])
    torch.testing.assert_close(counted, taken - uncounted)
    assert trained.diloco.steps == STEPS
    assert trained.steps < STEPS if rank == SLOW else trained.steps <= STEPS


@on_ranks(3)
def test_sums_that_overlap_with_steps_and_a_checkpoint_with_late_values() -> None:
    rank, _ = begin()
    trained = Trained(4, fragment_sync_delay=2, grace=0.0)
    trained.run(rank, "with a delay")
    assert same_at_all_ranks(trained.model.parameters())
    saved = trained.diloco.state_dict()
    other = Trained(4, fragment_sync_delay=2, grace=0.0)
    other.diloco.load_state_dict(saved)
    assert other.diloco.steps == STEPS
    for mine, theirs in zip(saved["fragments"], other.diloco.state_dict()["fragments"], strict=True):
        assert torch.equal(mine["kept"][0], theirs["kept"][0])


@on_ranks(2)
def test_what_cannot_be_is_refused() -> None:
    begin()
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)

    def refusal(**settings: Any) -> str:
        return error_of(
            lambda: DiLoCo([model], inner, torch.optim.SGD(model.parameters(), 1.0), 4, **settings)
        )

    assert "quorum=3: expected 1 to 2 ranks" in refusal(quorum=3)
    assert "quorum=0: expected 1 to 2 ranks" in refusal(quorum=0)
    assert "grace=-1.0: expected seconds" in refusal(quorum=1, grace=-1.0)
    assert "codec='int8' with quorum=1" in refusal(quorum=1, codec="int8")
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    assert "none of NetStorm's" in refusal(quorum=1, group=gloo)


EVERY = 4


def train_elastic(folder: str, delay: int) -> dict[str, Any]:
    """Train until an average says that the file "end" is in `folder`. Each step of each rank adds 1 to all
    parameters but one. The slow rank waits before a step while the file "late" is there.

    Args:
        folder: of the test.
        delay: steps that a sum may take.
    """
    elastic.init_process_group(PATIENCE)
    first, second = nn.Linear(300, 40), nn.Linear(40, 1)
    model = nn.ModuleList([first, second])
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    ending, checked = second.bias, second.weight  # of the fragment that a period ends with
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = elastic.ElasticSampler(10_000, 2)
    training = DiLoCo(
        [first, second],
        optimizer,
        outer,
        EVERY,
        fragment_sync_delay=delay,
        quorum=2,
        grace=0.05,
        state={"sampler": sampler},
    )
    newcomer, taken, before = elastic.is_newcomer(), 0, 0.0
    late = Path(folder) / "late"
    with training:
        while True:
            if dist.get_rank() == SLOW and late.exists():
                print(f"late after step {training.steps}.", flush=True)
                while late.exists():
                    time.sleep(0.01)
            sampler.take()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            ending.grad = torch.full_like(ending, -float((Path(folder) / "end").exists()))
            optimizer.step()
            taken += 1
            if training.steps % EVERY:
                continue
            now = checked[0, 0].item()
            gain, before = now - before, now
            print(f"gain {gain:.2f} of {list(training.state.ranks)} in step {training.steps}.", flush=True)
            if ending.item() > 0:
                print("has trained", flush=True)
                break
        training.load_global_parameters()
    last = training.state_dict()["fragments"][-1]
    found = {
        "newcomer": newcomer,
        "steps": training.steps,
        "taken": taken,
        "uncounted": -last["kept"][0][0].item(),  # of `checked`
        "value": checked[0, 0].item(),
        "samples": [sampler.epoch, sampler.position],
        "parameters": digest(model),
    }
    dist.destroy_process_group()
    return found


def check_same(found: list[dict[str, Any]]) -> None:
    """Assert that all ranks have come to the same."""
    for what in ("steps", "samples", "value", "parameters"):
        assert len({str(one[what]) for one in found}) == 1, (what, found)


def make_late(ranks: ElasticRanks, folder: Path) -> None:
    """Hold the slow rank up, until the others have had two averages without it."""
    pattern = r"late after step (\d+)\."
    times = len(re.findall(pattern, ranks.said(str(SLOW))))
    (folder / "late").touch()
    ranks.wait_until_said(str(SLOW), "late after step", times + 1)
    step = int(re.findall(pattern, ranks.said(str(SLOW)))[-1])
    ranks.wait_until_said("0", f"in step {(-(-step // EVERY) + 2) * EVERY}.")


@pytest.mark.parametrize("delay", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_it_is_late_keeps_nobody(forker: Any, tmp_path: Path, delay: int) -> None:
    with ElasticRanks(forker, tmp_path, begin=3, elastic="1:3") as ranks:
        for rank in range(3):
            ranks.start(str(rank), rank, train_elastic, delay=delay)
        ranks.wait_until_said("0", "of [0, 1, 2]")
        make_late(ranks, tmp_path)
        ranks.kill("2")
        (tmp_path / "late").unlink()
        ranks.wait_until_said("0", f"gain {EVERY - delay:.2f} of [0, 1]")
        ranks.start("back", SLOW, train_elastic, delay=delay)
        ranks.wait_until_said("back", f"gain {EVERY - delay:.2f} of [0, 1, 2]")
        (tmp_path / "end").touch()
        found = [ranks.answer(name) for name in ("0", "1", "back")]
        ranks.end()
    assert [one["newcomer"] for one in found] == [False, False, True]
    check_same(found)


def test_a_rank_of_an_elastic_job_that_was_late_loses_nothing(forker: Any, tmp_path: Path) -> None:
    with ElasticRanks(forker, tmp_path, begin=3, elastic="1:3") as ranks:
        for rank in range(3):
            ranks.start(str(rank), rank, train_elastic, delay=0)
        ranks.wait_until_said("0", "of [0, 1, 2]")
        for _ in range(2):
            make_late(ranks, tmp_path)
            averages = ranks.said("2").count("gain")
            (tmp_path / "late").unlink()
            ranks.wait_until_said("2", "gain", averages + 1)
        make_late(ranks, tmp_path)
        (tmp_path / "end").touch()
        ranks.wait_until_said("0", "has trained")
        (tmp_path / "late").unlink()
        found = [ranks.answer(name) for name in ("0", "1", "2")]
        ranks.end()
    check_same(found)
    counted = sum(one["taken"] - 3 * one["uncounted"] for one in found)
    assert 3 * found[0]["value"] == pytest.approx(counted, rel=1e-5)
    assert found[2]["taken"] < found[2]["steps"]
    assert found[2]["uncounted"] > 0
