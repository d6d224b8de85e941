"""What an elastic state holds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from netstorm.errors import UsageError
from netstorm.frontends.torch.elastic import ElasticSampler, StateEntries, data_parallel


def entries(step: int = 0) -> StateEntries:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return StateEntries({"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": step})


def test_objects_and_plain_values_are_taken_over() -> None:
    mine, others = entries(), entries(5)
    others["model"](torch.ones(4, 2)).sum().backward()
    others["optimizer"].step()
    mine.load(others.whole())
    assert mine["step"] == 5
    torch.testing.assert_close(mine["model"].state_dict(), others["model"].state_dict(), rtol=0, atol=0)
    assert mine["optimizer"].state_dict()["state"].keys() == others["optimizer"].state_dict()["state"].keys()


def test_what_an_optimiser_takes_over_is_its_own() -> None:
    mine, others = entries(), entries()
    others["model"](torch.ones(4, 2)).sum().backward()
    others["optimizer"].step()
    mine.load(others.whole())
    kept = mine["optimizer"].state_dict()["state"][0]["exp_avg"]
    before = kept.clone()
    others["optimizer"].state_dict()["state"][0]["exp_avg"].add_(1)
    assert torch.equal(kept, before)


def test_buffers_of_modules_are_not_compared() -> None:
    held = entries()
    assert "1.running_mean" in held.whole()["model"]
    assert sorted(held.compared()["model"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_the_state_of_another_program_is_refused() -> None:
    with pytest.raises(UsageError, match=r"and this one's \['model', 'optimizer', 'step'\]"):
        entries().load({"model": {}})


def test_only_plain_values_can_be_set() -> None:
    held = entries()
    held["step"] = 3
    assert held["step"] == 3
    for name in ("model", "steps"):
        with pytest.raises(UsageError, match=r"no plain value of this state: it has \['step'\]"):
            held[name] = 1


def test_samplers_hear_who_shares_the_samples() -> None:
    sampler = ElasticSampler(8, 2, shuffle=False)
    StateEntries({"sampler": sampler}).set_ranks(5, (1, 5), counts=True)
    assert sampler.take() == [2, 3]


@pytest.mark.parametrize("name", ["init_sync", "static_graph", "find_unused_parameters"])
def test_options_with_which_newcomers_would_make_other_calls_are_refused(name: str) -> None:
    options: dict[str, Any] = {name: True}
    with pytest.raises(UsageError, match=f"{name}=True: leave it out, since"):
        data_parallel(torch.nn.Linear(1, 1), **options)
