"""Training with local updates in an elastic job; every average is checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.local_updates import HFA, DiLoCo, ESync, LocalSGD
from tests.integration.torch.programs.begin import PATIENCE

EVERY = 4


def _training(kind: str, model: Any, optimizer: Any, state: dict[str, Any]) -> Any:
    if kind == "HFA":
        return HFA(model, optimizer, 2, 2, state=state)
    if kind == "ESync":
        return ESync(model, optimizer, least_steps=2, most_steps=EVERY, state=state)
    if kind.startswith("DiLoCo"):
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        codec = json.loads(kind.removeprefix("DiLoCo"))
        return DiLoCo(list(model), optimizer, outer, EVERY, codec=codec, state=state)
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
    parameters = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    found = {
        "newcomer": newcomer,
        "began": began,
        "steps": training.steps,
        "gains": sorted(gains),
        "parameters": hashlib.sha256(parameters).hexdigest(),
    }
    dist.destroy_process_group()
    return found
