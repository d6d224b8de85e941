"""PyTorch's own checkpoints over NetStorm's default group: DCP, FSDP, states of rank 0, saves in a thread."""

from __future__ import annotations

import copy
import importlib
import pickle
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import NodeLost
from netstorm.frontends.torch.errors import as_torch_error
from tests.integration.torch.begin import begin, error_of
from tests.integration.torch.ranks import on_ranks

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(data).pow(2).sum().backward()
    optimizer.step()


def sharded(*, trained: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(2 * trained):
        step(model, optimizer, number)
    return model, optimizer


def whole(model: Any) -> torch.Tensor:
    return torch.cat([each.full_tensor().reshape(-1) for each in model.parameters()])


@on_ranks(2)
def test_a_training_is_saved_and_resumed_by_all_of_pytorchs_own_calls_also_while_it_goes_on(
    folder: str,
) -> None:
    begin()
    _resume_from_full_states()
    _resume_on_meta()
    _ddp()
    _fsdp1()
    _async_save(folder)
    _save_while_training(folder)
    _distribute()
    _process_group()
    dist.destroy_process_group()


def _resume_from_full_states() -> None:
    """Do as PyTorch's FSDP2 example with its DCP calls: rank 0 saves all, and the others get theirs."""
    model, optimizer = sharded()
    states = copy.deepcopy(  # what is saved: steps are counted in the very tensors that are returned
        (get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL))
    )
    saved = states if dist.get_rank() == 0 else ({}, {})
    step(model, optimizer, 2)
    resumed, again = sharded(trained=False)
    set_model_state_dict(resumed, saved[0], options=FROM_RANK_0)
    set_optimizer_state_dict(resumed, again, saved[1], options=FROM_RANK_0)
    step(resumed, again, 2)
    assert torch.equal(whole(model), whole(resumed)), "the resumed training differs"


def _resume_on_meta() -> None:
    model, _optimizer = sharded()
    saved = get_model_state_dict(model, options=FULL)
    with torch.device("meta"):
        empty = net()
    fully_shard(empty)
    empty.to_empty(device="cpu")
    set_model_state_dict(empty, saved if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    assert torch.equal(whole(model), whole(empty)), "the parameters differ"


def _ddp() -> None:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(net())
    saved = get_model_state_dict(model, options=FULL)
    other = DistributedDataParallel(net())
    set_model_state_dict(other, saved if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    assert all(map(torch.equal, model.parameters(), other.parameters())), "the parameters differ"


def _fsdp1() -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = model.state_dict()
            moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)
            model.load_state_dict(state)


def _async_save(folder: str) -> None:
    model, _optimizer = sharded()
    expected = whole(model)
    dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/async").result()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/async")
    assert torch.equal(whole(model), expected), "what was saved differs"


def _distribute() -> None:
    """Do as PyTorch's FSDP2 example without DCP: each tensor is distributed as the parameter is."""
    model, _optimizer = sharded()
    expected = whole(model)
    full = {name: each.full_tensor() for name, each in model.state_dict().items()}
    fresh = sharded(trained=False)[0]
    shards = {
        name: nn.Parameter(distribute_tensor(full[name], each.device_mesh, each.placements))
        for name, each in fresh.state_dict().items()
    }
    fresh.load_state_dict(shards, strict=False, assign=True)
    assert torch.equal(whole(fresh), expected), "the parameters differ"


def _process_group() -> None:
    """Ask the group what PyTorch and TorchTitan ask one."""
    group: Any = dist.group.WORLD
    own: Any = dist.distributed_c10d
    cpu = torch.device("cpu")
    assert cpu in group._device_types
    assert "cpu" in own._device_capability(group)
    assert own._get_object_coll_device(group) == "cpu"
    backend = group._get_backend(cpu)
    assert backend.name() == group._get_backend_name() == "netstorm"
    for ability in ("coalescing", "shrinking", "splitting", "time_estimate"):
        assert getattr(backend, f"supports_{ability}") is False
    assert backend.supports_tensor_alloc(cpu) is False
    assert error_of(lambda: group._get_backend(torch.device("meta"))).startswith("RuntimeError: No backend")
    own._set_pg_timeout(timedelta(seconds=77))
    assert backend.options._timeout == timedelta(seconds=77)
    assert list(backend.options.global_ranks_in_group) == [0, 1]
    assert backend.options.backend == "netstorm"
    alone: Any = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert list(alone.options.global_ranks_in_group) == [dist.get_rank()]
    assert group.bound_device_id is None
    group.get_group_store().set("asked", "yes")
    lost = pickle.loads(pickle.dumps(as_torch_error(NodeLost("rank 1"))))  # checkpoints gather errors so
    assert isinstance(lost, NodeLost)
    assert isinstance(lost, dist.DistBackendError)


def _save_while_training(folder: str) -> None:
    """Save over the default group in DCP's thread, while DDP trains over it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = []
    for save in range(3):
        expected.append({name: each.clone() for name, each in model.module.state_dict().items()})
        pending = dcp.async_save({"net": expected[-1]}, checkpoint_id=f"{folder}/{save}")
        for number in range(20):
            step(model, optimizer, 20 * save + number)
        pending.result()
    for save, state in enumerate(expected):
        found = {name: torch.zeros_like(each) for name, each in state.items()}
        dcp.load({"net": found}, checkpoint_id=f"{folder}/{save}")
        assert all(torch.equal(found[name], state[name]) for name in state), save
