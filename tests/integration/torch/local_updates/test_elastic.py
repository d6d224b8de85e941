"""Local updates in elastic jobs of PyTorch: ranks are killed, come back and join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.local_updates import HFA, DiLoCo, ESync, LocalSGD
from tests.integration.torch.begin import PATIENCE, digest
from tests.integration.torch.elastic_ranks import ElasticRanks

EVERY = 4


def _training(kind: str, model: Any, optimizer: Any, state: dict[str, Any]) -> Any:
    if kind == "HFA":
        return HFA(model, optimizer, 2, 2, state=state)
    if kind == "ESync":
        return ESync(model, optimizer, least_steps=2, most_steps=EVERY, state=state)
    if kind.startswith("DiLoCo"):
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = json.loads(kind.removeprefix("DiLoCo"))
        return DiLoCo(list(model), optimizer, outer, EVERY, state=state, **settings)
    return LocalSGD(model, optimizer, EVERY, state=state)


def train(folder: str, kind: str) -> dict[str, Any]:
    """Train until an average says that the file "end" is in `folder`. Each step of each rank adds 1 to all
    parameters but one, so an average adds the mean number of steps of those who are in it.

    Args:
        folder: of the test.
        kind: of local updates.
    """
    elastic.init_process_group(PATIENCE)
    torch.manual_seed(dist.get_rank())
    first, second = nn.Linear(300, 40), nn.Linear(40, 1)
    model = nn.ModuleList([first, second])
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(dist.get_rank()))
    ending = second.bias
    nn.init.zeros_(ending)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    newcomer = elastic.is_newcomer()
    training = _training(kind, model, optimizer, {"before": torch.zeros(1), "seen": []})
    # Of DiLoCo's fragments the last one is applied at the end of a period.
    checked = [second.weight] if kind.startswith("DiLoCo") else [first.weight, second.weight]
    with training:
        state = training.state
        if not newcomer:
            state["before"] = torch.stack([weight[0, 0].detach() for weight in checked])
        began, gains = training.steps, set()
        while True:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            ending.grad = torch.full_like(ending, -float((Path(folder) / "end").exists()))
            optimizer.step()
            averaged = training.steps % EVERY == 0 if kind.startswith("DiLoCo") else training.is_averaged
            if not averaged:
                continue
            now = torch.stack([weight[0, 0].detach() for weight in checked])
            gains.update((now - state["before"]).tolist())
            state["before"] = now
            if list(state.ranks) != state["seen"]:
                state["seen"] = list(state.ranks)
                print(f"period {state.number} of {state['seen']}", flush=True)
            if ending.item() > 0:
                break
        if isinstance(training, DiLoCo):
            training.load_global_parameters()
    found = {
        "newcomer": newcomer,
        "began": began,
        "steps": training.steps,
        "gains": sorted(gains),
        "parameters": digest(model),
    }
    dist.destroy_process_group()
    return found


def _slow(*parameters: object) -> Any:
    return pytest.param(*parameters, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("LocalSGD", EVERY),
        _slow("HFA", EVERY),
        _slow("ESync", EVERY),
        _slow('DiLoCo{"codec": "int8"}', EVERY),
        _slow('DiLoCo{"codec": "int8", "fragment_sync_delay": 2}', EVERY - 2),
        _slow('DiLoCo{"codec": "float32", "fragment_sync_delay": 3}', EVERY - 3),
    ],
)
def test_who_is_killed_and_comes_back_ends_with_the_same_parameters(
    forker: Any, tmp_path: Path, kind: str, steps: int
) -> None:
    """`steps` are those of a rank that one average has."""
    sites = {"NETSTORM_SITE": "east"}  # HFA's averages of sites are of all that have begun the job
    with ElasticRanks(forker, tmp_path, begin=3, elastic="1:4", **sites) as ranks:
        for rank in range(3):
            ranks.start(str(rank), rank, train, kind=kind)
        ranks.wait_until_said("1", "of [0, 1, 2]")
        ranks.kill("0")
        ranks.wait_until_said("1", "of [1, 2]")
        ranks.start("back", 0, train, kind=kind)
        ranks.start("new", 3, train, kind=kind)
        ranks.wait_until_said("1", "of [0, 1, 2, 3]")
        (tmp_path / "end").touch()
        found = [ranks.answer(name) for name in ("1", "2", "back", "new")]
        ranks.end()
    assert [one["newcomer"] for one in found] == [False, False, True, True]
    assert len({one["parameters"] for one in found}) == 1
    if kind != "ESync":
        assert len({one["steps"] for one in found}) == 1
    for one in found:
        # A rank that has just come may have taken fewer steps; what int8 rounds off comes later.
        assert all(0.9 <= gain <= 4.2 for gain in one["gains"]), one
    assert any(abs(gain - steps) < 0.01 for gain in found[0]["gains"]), found[0]
    assert found[2]["began"] > 0, "it has begun anew"
