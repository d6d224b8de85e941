"""AsynchronousSGD in elastic jobs: owners of parameters are killed, and ranks join."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from tests.integration.torch.begin import PATIENCE, error_of
from tests.integration.torch.elastic_ranks import Started

PLACES = 8
"""Elements that are one process's each, over and over."""


class _Weights(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(value)


def counts(folder: str, number: int) -> dict[str, Any]:
    """Add ones to this process's own elements until the file "end" is in `folder`; return the sums.

    Args:
        folder: of the test.
        number: of this process.
    """
    elastic.init_process_group(PATIENCE)
    newcomer = elastic.is_newcomer()
    model = _Weights(torch.full((4000, PLACES), 99.0 if newcomer else 0.0))
    training = AsynchronousSGD(model, lr=1.0, lamda=0.0)
    at_first = model.values.detach().amax(0).tolist()
    before = model.values.detach().clone()
    early = error_of(dist.barrier) if newcomer else ""
    live: tuple[int, ...] = ()
    while not (Path(folder) / "end").exists():
        if elastic.live_ranks() != live:
            live = elastic.live_ranks()
            print("with ranks", live, flush=True)
        model.values.grad = torch.zeros(4000, PLACES)
        model.values.grad[:, number] = -1
        training.step()
        found = model.values.detach().clone()
        assert (found[:, number] == training.steps).all(), (training.steps, found[:3])
        assert (found >= before).all()
        before = found
        print("confirmed", training.steps, flush=True)
    steps = training.steps
    (Path(folder) / f"ended {number}").touch()
    while not (Path(folder) / "all ended").exists():
        model.values.grad = torch.zeros(4000, PLACES)
        training.step()  # by which others are not too far ahead to end
    training.pull()
    values = model.values.detach()
    dist.destroy_process_group()
    return {
        "steps": steps,
        "early": early,
        "at_first": at_first,
        "least": values.amin(0).tolist(),
        "most": values.amax(0).tolist(),
    }


def alone(folder: str, number: int) -> dict[str, Any]:
    """Rank 1 trains alone, and the others own parameters; return how far the values were from PyTorch's.

    The file "steps" has two numbers: how many steps to take, and how many steps without a gradient others
    have taken before the next one.

    Args:
        folder: of the test.
        number: of this process.
    """
    elastic.init_process_group(PATIENCE)
    rank = dist.get_rank()
    torch.manual_seed(number)
    model = _Weights(torch.rand(3001))
    training = AsynchronousSGD(model, lr=0.25, momentum=0.5, lamda=0.0)
    values = nn.Parameter(model.values.detach().clone())
    expected = torch.optim.SGD([values], lr=0.25, momentum=0.5)
    worst, others = 0.0, 0
    model.values.grad = torch.zeros(3001)
    training.step()  # it takes part
    while not (Path(folder) / "end").exists():
        wanted, taken = map(int, (Path(folder) / "steps").read_text().split())
        if rank == 1 and training.steps <= wanted:
            while others < taken:
                others, values.grad = others + 1, torch.zeros(3001)
                expected.step()
            model.values.grad = torch.linspace(-1, training.steps, 3001)
            values.grad = model.values.grad.clone()
            expected.step()
            training.step()
            worst = max(worst, float((model.values - values).abs().max()))
            print("step", training.steps - 1, flush=True)
        else:
            print("with ranks", elastic.live_ranks(), flush=True)
            time.sleep(0.02)
    dist.destroy_process_group()
    return {"worst": worst}


def confirmed(said: str) -> int:
    """Return how many steps of a process were confirmed, by its own words."""
    lines = [line for line in said.splitlines() if line.startswith("confirmed ")]
    return int(lines[-1].split()[1])


@pytest.mark.parametrize("staleness", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_every_confirmed_push_counts_once_after_owners_were_killed_and_one_has_joined(
    job: Started, staleness: int
) -> None:
    ranks = job(3, "1:4", CHUNK_SIZE=5000, NETSTORM_STALENESS=staleness)
    for rank in range(3):
        ranks.start(f"first {rank}", rank, counts, number=rank)
    ranks.wait_until_said("first 0", "confirmed 5\n")
    ranks.kill("first 0")
    killed = {0: confirmed(ranks.said("first 0"))}
    ranks.wait_until_said("first 1", "with ranks (1, 2)")
    ranks.start("back", 0, counts, number=3)
    ranks.wait_until_said("back", "confirmed 5\n")
    ranks.kill("first 1")
    killed[1] = confirmed(ranks.said("first 1"))
    ranks.wait_until_said("back", "with ranks (0, 2)")
    (ranks.folder / "end").touch()
    for number in (2, 3):
        ranks.wait_until_there(f"ended {number}")
    (ranks.folder / "all ended").touch()
    answers = [ranks.answer("first 2"), ranks.answer("back")]
    ranks.end()
    steps = {2: answers[0]["steps"], 3: answers[1]["steps"]}
    for answer in answers:
        for values in (answer["least"], answer["most"]):
            for number, found in enumerate(values):
                if number in killed:
                    assert found in (killed[number], killed[number] + 1), (number, answers, killed)
                else:
                    assert found == steps.get(number, 0), (number, answers, killed)
    assert answers[1]["at_first"][0] >= killed[0]
    assert answers[1]["at_first"][4] == 0
    assert "does not have its state yet" in answers[1]["early"]


def test_a_momentum_goes_on_at_new_owners_as_if_nothing_had_happened(job: Started) -> None:
    ranks = job(3, "1:4", CHUNK_SIZE=500)

    def until(steps: int, others: int = 0) -> None:
        new = ranks.folder / "new"
        new.write_text(f"{steps} {others}")
        new.replace(ranks.folder / "steps")
        if steps:
            ranks.wait_until_said("first 1", f"step {steps}\n")

    until(0)
    for rank in range(3):
        ranks.start(f"first {rank}", rank, alone, number=rank)
    for rank in (0, 2):
        ranks.wait_until_said(f"first {rank}", "with ranks (0, 1, 2)")
    until(4)
    ranks.kill("first 0")
    until(7)
    ranks.start("back", 0, alone, number=3)
    ranks.wait_until_said("back", "with ranks (0, 1, 2)")
    until(9, others=1)
    ranks.kill("first 2")
    until(12, others=1)
    (ranks.folder / "end").touch()
    answers = [ranks.answer("first 1"), ranks.answer("back")]
    ranks.end()
    assert answers[0]["worst"] < 1e-5
