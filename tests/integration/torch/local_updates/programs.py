"""What ranks run in these tests. They return NumPy arrays, which pipes carry as they are."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import NetStormError
from netstorm.frontends.torch import plain_values
from netstorm.frontends.torch.comm_hooks import (
    NetStormHookState,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
    netstorm_hook,
)
from netstorm.frontends.torch.local_updates import HFA, DiLoCo, LocalSGD, Ranks, Waitable
from netstorm.frontends.torch.site_mesh import site_mesh
from tests.integration.torch.local_updates.task import IN, LEARNING_RATE, MIDDLE, OUT, batch

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, MIDDLE), nn.Linear(MIDDLE, OUT)).to(dtype)


def arrays(values: Any) -> list[np.ndarray[Any, Any]]:
    return [value.detach().to(torch.float64).numpy().copy() for value in values]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int | None = None) -> None:
    """Train on the batches of `rank`, which is the process's own unless it is given."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        numbers = batch(dist.get_rank() if rank is None else rank, step)
        inputs, targets = (torch.tensor(part, dtype=dtype) for part in numbers)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def local_sgd(*, steps: int, sync_every: int, stop_at: int = 0) -> list[Any]:
    """Train, with new objects after step `stop_at`."""
    model = make_model(seed=dist.get_rank())
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    training = LocalSGD(model, inner, sync_every)
    if stop_at:
        with training:
            train(model, inner, range(1, stop_at + 1))
        saved = training.state_dict()
        training = LocalSGD(model, inner, sync_every)
        training.load_state_dict(saved)
    with training:
        train(model, inner, range(stop_at + 1, steps + 1))
    return arrays(model.parameters())


def checkpoints_of_others() -> list[tuple[str, str]]:
    """Return what loading says to checkpoints of other settings, and of another model."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    of_ten = DiLoCo([model], inner, outer, 10).state_dict()
    in_two = DiLoCo(list(model), inner, outer, 20).state_dict()
    training = DiLoCo([model], inner, outer, 20)
    simple = LocalSGD(model, inner, 3)
    return [
        error_of(lambda: training.load_state_dict(of_ten)),
        error_of(lambda: training.load_state_dict(in_two)),
        error_of(lambda: simple.load_state_dict(LocalSGD(model, inner, 4).state_dict())),
    ]


def diloco(*, steps: int, outer: Mapping[str, Any] = OUTER, seeds: bool = False, **settings: Any) -> Any:
    """Return the local parameters after the last step, and the global ones."""
    model = make_model(seed=dist.get_rank() if seeds else 0)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    with DiLoCo(list(model), inner, torch.optim.SGD(model.parameters(), **outer), **settings) as training:
        train(model, inner, range(1, steps + 1))
        trained = arrays(model.parameters())
        training.load_global_parameters()
        return trained, arrays(model.parameters())


def diloco_of_single_precision(*, steps: int, codec: str, size: int) -> Any:
    """Return the global parameters of a model of several blocks of the int8 codec, and the loss."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(IN, size), nn.Tanh(), nn.Linear(size, OUT))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    with DiLoCo([model], inner, outer, 3, fragment_sync_delay=2, codec=codec) as training:
        train(model, inner, range(1, steps + 1))
        training.sync()
        training.load_global_parameters()
    return [array.tobytes() for array in arrays(model.parameters())]


def interrupted(*, steps: int, stop_at: int | None, codec: str) -> Any:
    """Train, saving everything to bytes after step `stop_at` and going on with new objects."""

    def begin() -> tuple[nn.Sequential, torch.optim.Optimizer, DiLoCo]:
        model = make_model(seed=7, dtype=torch.float32)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer: list[torch.optim.Optimizer] = [torch.optim.SGD(part.parameters(), **OUTER) for part in model]
        settings: dict[str, Any] = {"fragment_sync_delay": 3, "fragment_update_alpha": 0.25, "codec": codec}
        return model, inner, DiLoCo(list(model), inner, outer, 6, **settings)

    model, inner, training = begin()
    with training:
        train(model, inner, range(1, (stop_at or steps) + 1))
        file = io.BytesIO()
        if stop_at is not None:
            torch.save([model.state_dict(), inner.state_dict(), training.state_dict()], file)
    if stop_at is not None:
        model, inner, training = begin()
        file.seek(0)
        things: list[Any] = [model, inner, training]
        for thing, saved in zip(things, torch.load(file, weights_only=True), strict=True):
            thing.load_state_dict(saved)
        with training:
            train(model, inner, range(stop_at + 1, steps + 1))
    local = arrays(model.parameters())
    training.load_global_parameters()
    return [array.tobytes() for array in [*local, *arrays(model.parameters())]]


class InThirds:
    """A script's own codec: three collectives, one after the other, and the largest value is kept."""

    name = "in thirds"
    collectives = 3

    def __init__(self) -> None:
        self.largest: torch.Tensor | None = None

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        for third in update.tensor_split(3):
            yield ranks.begin_sum(third)
        self.largest = update.abs().max().view(1)
        return update.div_(ranks.size)

    def kept(self) -> torch.Tensor | None:
        return self.largest

    def keep(self, kept: torch.Tensor | None) -> None:
        self.largest = kept


def local_sgd_diverging() -> Any:
    """Rank 1 gets a value that is not finite; return the error, and whether parameters changed."""
    model = make_model(seed=3)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)

    def go() -> None:
        with LocalSGD(model, inner, 1):
            with torch.no_grad():
                next(iter(model.parameters()))[0, 0] = np.inf if dist.get_rank() == 1 else 7.0
            inner.step()

    return error_of(go), float(next(iter(model.parameters()))[0, 0])


def error_of(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except NetStormError as error:
        return type(error).__name__, str(error)
    return "", "no error"


def diverging(*, codec: str, value: float, delay: int) -> tuple[str, str]:
    """Rank 1 gets a value that is not finite into the second fragment."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)

    def go() -> None:
        with DiLoCo(list(model), inner, outer, 4, fragment_sync_delay=delay, codec=codec):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    list(model.parameters())[3][0] = value
            for _ in range(4):
                inner.zero_grad()
                inner.step()

    return error_of(go)


def different_settings() -> tuple[str, str]:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    return error_of(DiLoCo([model], inner, outer, 10 + dist.get_rank()).__enter__)


class Bomb:
    """Stands for an object that is sent: whoever unpickles it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def hostile_pickles(folder: str) -> list[str]:
    """Rank 1 pickles a bomb wherever an object is sent. Return how each technique began here."""
    model = make_model(dtype=torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("site", "local"))
    beginnings: list[Callable[[], object]] = [
        DiLoCo([model], inner, outer, 10).__enter__,
        LocalSGD(model, inner, 10).__enter__,
        HFA(model, inner, 2, 2, mesh=mesh).__enter__,
        lambda: site_mesh(outer_backend="gloo"),
    ]
    to_tensor = dist.distributed_c10d._object_to_tensor

    def bomb(_thing: object, *rest: Any) -> Any:
        return to_tensor(Bomb(f"{folder}/ran"), *rest)

    with patch.object(dist.distributed_c10d, "_object_to_tensor", bomb if dist.get_rank() else to_tensor):
        return [error_of(begin)[1] for begin in beginnings]


def hostile_values(*, content: bytes, announced: int | None) -> tuple[str, str]:
    """Rank 1 sends `content` for its settings, and says that it has another length."""
    model = make_model()
    training = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
    if dist.get_rank() == 0:
        return error_of(training.__enter__)
    gather = plain_values._all_gather

    def lie(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
        return gather(mine if announced is None else torch.full_like(mine, announced), group)

    with (
        patch.object(plain_values, "_encoded", lambda *_: content),
        patch.object(plain_values, "_all_gather", lie),
    ):
        return error_of(training.__enter__)


def _fail() -> None:
    raise LookupError("the script's own")


def left_by_an_exception(*, delay: int) -> Any:
    """Return how the context was left, and what state_dict and entering again say afterwards."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    training = DiLoCo(
        [model], inner, torch.optim.SGD(model.parameters(), lr=1.0), 4, fragment_sync_delay=delay
    )
    saved = training.state_dict()
    left = ""
    try:
        with training:
            train(model, inner, range(1, 4))
            _fail()
    except LookupError as error:
        left = str(error)
    dist.barrier()
    refused = error_of(training.state_dict)
    again = error_of(training.__enter__)
    if again[0]:
        training.load_state_dict(saved)
        with training:
            train(model, inner, range(1, 5))
        return left, refused, again, training.steps
    training.__exit__(None, None, None)
    return left, refused, again, training.steps


def left_in_mid_interval() -> Any:
    """Return local parameters when leaving, and after one more step of the optimiser, and the counts."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    training = DiLoCo([model], inner, torch.optim.SGD(model.parameters(), lr=1.0), 4, fragment_sync_delay=2)
    with training:
        train(model, inner, range(1, 4))
        before = arrays(model.parameters())
    after = arrays(model.parameters())
    train(model, inner, range(4, 9))
    return before, after, training.steps


def mixed_types() -> Any:
    """Return the types, whether gradients survived, and the global parameters as bytes."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4).to(torch.float64), nn.ReLU()
    )
    model[0].bias.requires_grad_(False)
    inner = torch.optim.SGD([part for part in model.parameters() if part.requires_grad], lr=0.1)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    with DiLoCo([model], inner, outer, 2, codec="int8") as training:
        for _ in range(4):
            for part in model.parameters():
                if part.requires_grad:
                    part.grad = torch.full_like(part, 1.0 + dist.get_rank())
            inner.step()
        kept = [None if part.grad is None else float(part.grad.mean()) for part in model.parameters()]
        training.load_global_parameters()
    types = [str(part.dtype) for part in model.parameters()]
    return types, kept, [array.tobytes() for array in arrays(model.parameters())]


def subgroup() -> Any:
    """Ranks 0 and 2 train together; rank 1 finds that it may not."""
    group = dist.new_group([0, 2])
    model = make_model(seed=dist.get_rank())
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)

    def go() -> None:
        with DiLoCo([model], inner, outer, 2, group=group):
            train(model, inner, range(1, 5))

    return error_of(go), arrays(model.parameters())


def sharded(*, steps: int, codec: str) -> Any:
    """Two sites of two ranks: FSDP2 shards the model inside a site, DiLoCo averages shards between sites.

    Return the whole global parameters, and the shards' sizes.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "local"))
    model = make_model(seed=mesh["site"].get_local_rank())
    for layer in model:
        fully_shard(layer, mesh=mesh["local"])
    fully_shard(model, mesh=mesh["local"])
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    group = mesh["site"].get_group()
    with DiLoCo(list(model), inner, outer, 6, group=group, fragment_sync_delay=2, codec=codec) as training:
        train(model, inner, range(1, steps + 1), rank=mesh["site"].get_local_rank())
        training.load_global_parameters()
        parameters: list[Any] = list(model.parameters())
        values = arrays(part.full_tensor() for part in parameters)
    return values, [part.to_local().numel() for part in parameters]


HOOKS: dict[str, Any] = {
    "netstorm": netstorm_hook,
    "fp16": fp16_compress_wrapper(netstorm_hook),
    "bf16": bf16_compress_wrapper(netstorm_hook),
}


def ddp(*, hook: str | None, steps: int, own_group: bool = True) -> Any:
    model = DistributedDataParallel(make_model(dtype=torch.float32), bucket_cap_mb=0.0001)
    if hook is not None:
        group = dist.new_group() if own_group else None
        model.register_comm_hook(NetStormHookState(group), HOOKS[hook])
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    train(model, inner, range(1, steps + 1))
    return arrays(model.parameters())


def digits(*, way: str, epochs: int) -> float:
    """Train on scikit-learn's digits and return the accuracy on a fifth that was kept out."""
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(3).permutation(len(inputs))
    inputs = torch.tensor(inputs[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(labels[order])
    held_out = len(inputs) // 5
    mine = slice(held_out + dist.get_rank(), None, dist.get_world_size())
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def epoch(network: nn.Module) -> None:
        for part, wanted in zip(inputs[mine].split(16), labels[mine].split(16), strict=True):
            inner.zero_grad()
            nn.functional.cross_entropy(network(part), wanted).backward()
            inner.step()

    if way == "ddp":
        network = DistributedDataParallel(model)
        for _ in range(epochs):
            epoch(network)
    else:
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        fragments: list[nn.Module] = [model[0], model[2]]
        with DiLoCo(
            fragments, inner, outer, 10, fragment_sync_delay=2, fragment_update_alpha=0.5, codec=way
        ) as training:
            for _ in range(epochs):
                epoch(model)
            training.sync()
            training.load_global_parameters()
    with torch.no_grad():
        right = model(inputs[:held_out]).argmax(dim=1) == labels[:held_out]
    return float(right.float().mean())
