"""DiLoCo whose sums wait for a quorum: what is late counts later, and ranks that are behind come up again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch.local_updates import DiLoCo
from tests.integration.torch.begin import PATIENCE, begin, error_of, same_at_all_ranks, store
from tests.integration.torch.ranks import on_ranks

SLOW, STEPS = 2, 40


class Trained:
    """One training: each step of each rank adds 1 to all parameters, and so do averages, by their steps."""

    def __init__(self, sync_every: int, **settings: Any) -> None:
        self.model = nn.Linear(300, 40)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        outer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.diloco = DiLoCo([self.model], self.inner, outer, sync_every, quorum=2, grace=0.05, **settings)
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
                if rank == 0 and self.diloco.steps == 2 * self.diloco.state_dict()["settings"]["sync_every"]:
                    store().set(key, "")
            self.diloco.load_global_parameters()


@on_ranks(3)
def test_no_step_of_a_late_rank_is_lost_and_it_leaves_some_out() -> None:
    rank, ranks = begin()
    trained = Trained(2)
    trained.run(rank, "without delay")
    assert same_at_all_ranks(trained.model.parameters())
    [fragment] = trained.diloco.state_dict()["fragments"]
    uncounted = ranks * fragment["kept"][0]
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
    trained = Trained(4, fragment_sync_delay=2)
    trained.run(rank, "with a delay")
    assert same_at_all_ranks(trained.model.parameters())
    saved = trained.diloco.state_dict()
    other = Trained(4, fragment_sync_delay=2)
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
