"""LocalSGD, DiLoCo and DDP's hooks in real processes over Gloo, against a simulation in NumPy."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch import plain_values
from netstorm.frontends.torch.comm_hooks import (
    NetStormHookState,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
    netstorm_hook,
)
from netstorm.frontends.torch.local_updates import HFA, DiLoCo, LocalSGD, Ranks, Waitable
from netstorm.frontends.torch.site_mesh import site_mesh
from tests.integration.torch.begin import begin, error_of, same_at_all_ranks
from tests.integration.torch.local_updates import task
from tests.integration.torch.local_updates.task import IN, LEARNING_RATE, MIDDLE, OUT, batch
from tests.integration.torch.ranks import on_ranks

PLAIN: dict[str, Any] = {"lr": 1.0}
NESTEROV: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, MIDDLE), nn.Linear(MIDDLE, OUT)).to(dtype)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **(settings or {"lr": LEARNING_RATE}))


def arrays(values: Any) -> list[np.ndarray[Any, Any]]:
    return [value.detach().to(torch.float64).numpy().copy() for value in values]


def start(seed: int = 0) -> task.Values:
    return arrays(make_model(seed).parameters())


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int | None = None) -> None:
    """Train on the batches of `rank`, which is the process's own unless it is given."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        numbers = batch(dist.get_rank() if rank is None else rank, step)
        inputs, targets = (torch.tensor(part, dtype=dtype) for part in numbers)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@on_ranks(3)
def test_local_sgd_averages_parameters_every_few_steps_also_after_a_checkpoint() -> None:
    begin("gloo")
    for stop_at in (0, 2):
        model = make_model(seed=dist.get_rank())
        inner = sgd(model)
        training = LocalSGD(model, inner, 3)
        if stop_at:
            with training:
                train(model, inner, range(1, stop_at + 1))
            saved = training.state_dict()
            training = LocalSGD(model, inner, 3)
            training.load_state_dict(saved)
        with training:
            train(model, inner, range(stop_at + 1, 7))
        assert_close(arrays(model.parameters()), task.averaged(start(), 3, steps=6, sync_every=3))
    # An average that is not finite changes nothing.
    model, value = make_model(seed=3), np.inf if dist.get_rank() == 1 else 7.0
    inner, first = sgd(model, lr=0.0), next(iter(model.parameters()))

    def diverge() -> None:
        with LocalSGD(model, inner, 1):
            with torch.no_grad():
                first[0, 0] = value
            inner.step()

    assert error_of(diverge).startswith("NonFiniteUpdate")
    assert float(first[0, 0]) == value


def diloco(*, steps: int, outer: Mapping[str, Any] = NESTEROV, seed: int = 0, **settings: Any) -> Any:
    """Return the local parameters after the last step, and the global ones."""
    model = make_model(seed)
    inner = sgd(model)
    with DiLoCo(list(model), inner, sgd(model, **outer), **settings) as training:
        train(model, inner, range(1, steps + 1))
        trained = arrays(model.parameters())
        training.load_global_parameters()
        return trained, arrays(model.parameters())


STREAMED = {
    "at once": (6, (3, 6), 0, 0.0),
    "one step late": (6, (3, 6), 1, 0.0),
    "two steps late": (6, (3, 6), 2, 0.3),
    "longer than the stagger": (6, (3, 6), 5, 0.3),
    "uneven": (5, (3, 5), 2, 0.5),
    "each step": (1, (1, 1), 0, 0.5),
}
"""sync_every, in which step each fragment is applied, delay, alpha."""


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


@on_ranks(3)
def test_streamed_fragments_equal_a_simulation_of_all_ranks() -> None:
    rank, ranks = begin("gloo")
    for sync_every, applied_at, delay, alpha in STREAMED.values():
        settings: dict[str, Any] = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        found = diloco(steps=16, sync_every=sync_every, **settings)
        local, shared = task.simulate(
            start(),
            ranks=ranks,
            steps=16,
            sync_every=sync_every,
            applied_at=applied_at,
            outer=task.Outer(**NESTEROV),
            delay=delay,
            alpha=alpha,
        )
        assert_close(found[0], local[rank])
        assert_close(found[1], shared)
    # After every step with a plain outer SGD it is averaging.
    for values in diloco(steps=5, sync_every=1, outer=PLAIN):
        assert_close(values, task.averaged(start(), ranks, steps=5, sync_every=1))
    # All begin with the first one's parameters.
    plain = task.Outer(**PLAIN)
    _, expected = task.simulate(start(), ranks=ranks, steps=2, sync_every=2, applied_at=(1, 2), outer=plain)
    assert_close(diloco(steps=2, sync_every=2, outer=PLAIN, seed=rank)[1], expected)
    # A codec of the script's own averages in as many collectives as it likes.
    for delay in (0, 2):
        own, built_in = (
            diloco(steps=13, sync_every=4, fragment_sync_delay=delay, codec=codec)
            for codec in (InThirds, "float32")
        )
        assert_close(own[0], built_in[0])
        assert_close(own[1], built_in[1])


@on_ranks(1)
def test_one_rank_trains_as_many_do() -> None:
    begin("gloo")
    local, shared = diloco(steps=7, sync_every=4, codec="float32")
    outer = task.Outer(**NESTEROV)
    [of_rank], expected = task.simulate(
        start(), ranks=1, steps=7, sync_every=4, applied_at=(2, 4), outer=outer
    )
    assert_close(local, of_rank)
    assert_close(shared, expected)


@on_ranks(3)
def test_global_parameters_have_the_same_bits_at_all_ranks_and_their_own_types() -> None:
    rank, _ = begin("gloo")
    inner: torch.optim.Optimizer
    for codec in ("bfloat16", "int8"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(IN, 100), nn.Tanh(), nn.Linear(100, OUT))  # several blocks of int8
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        with DiLoCo(
            [model], inner, sgd(model, **NESTEROV), 3, fragment_sync_delay=2, codec=codec
        ) as training:
            train(model, inner, range(1, 9))
            training.sync()
            training.load_global_parameters()
        assert same_at_all_ranks(model.parameters())

    mixed = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4).to(torch.float64), nn.ReLU()
    )
    mixed[0].bias.requires_grad_(False)
    inner = torch.optim.SGD([part for part in mixed.parameters() if part.requires_grad], lr=0.1)
    with DiLoCo([mixed], inner, sgd(mixed, **NESTEROV), 2, codec="int8") as training:
        for _ in range(4):
            for part in mixed.parameters():
                if part.requires_grad:
                    part.grad = torch.full_like(part, 1.0 + rank)
            inner.step()
        kept = [None if part.grad is None else float(part.grad.mean()) for part in mixed.parameters()]
        training.load_global_parameters()
    assert kept == [1.0 + rank, None, *[1.0 + rank] * 4]  # scripts find their gradients
    types = [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float64] * 2
    assert [part.dtype for part in mixed.parameters()] == types
    assert same_at_all_ranks(mixed.parameters())


def interrupted(*, stop_at: int | None, codec: str) -> list[bytes]:
    """Train 14 steps, saving everything to bytes after step `stop_at` and going on with new objects."""

    def make() -> tuple[nn.Sequential, torch.optim.Optimizer, DiLoCo]:
        model = make_model(seed=7, dtype=torch.float32)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer: list[torch.optim.Optimizer] = [sgd(part, **NESTEROV) for part in model]
        settings: dict[str, Any] = {"fragment_sync_delay": 3, "fragment_update_alpha": 0.25, "codec": codec}
        return model, inner, DiLoCo(list(model), inner, outer, 6, **settings)

    model, inner, training = make()
    with training:
        train(model, inner, range(1, (stop_at or 14) + 1))
        file = io.BytesIO()
        if stop_at is not None:
            torch.save([model.state_dict(), inner.state_dict(), training.state_dict()], file)
    if stop_at is not None:
        model, inner, training = make()
        file.seek(0)
        things: list[Any] = [model, inner, training]
        for thing, saved in zip(things, torch.load(file, weights_only=True), strict=True):
            thing.load_state_dict(saved)
        with training:
            train(model, inner, range(stop_at + 1, 15))
    local = arrays(model.parameters())
    training.load_global_parameters()
    return [array.tobytes() for array in [*local, *arrays(model.parameters())]]


@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_bit_for_bit_and_one_of_other_settings_is_refused() -> None:
    begin("gloo")
    for codec, places in (
        ("float32", (4, 9)),
        ("int8", (7,)),
    ):
        whole = interrupted(stop_at=None, codec=codec)
        assert all(interrupted(stop_at=place, codec=codec) == whole for place in places), codec
    model = make_model()
    inner, outer = sgd(model), sgd(model, **PLAIN)
    training, simple = DiLoCo([model], inner, outer, 20), LocalSGD(model, inner, 3)
    for into, saved, said in (
        (training, DiLoCo([model], inner, outer, 10), "saved with sync_every=10, this DiLoCo has 20"),
        (training, DiLoCo(list(model), inner, outer, 20), "saved with model_fragments="),
        (simple, LocalSGD(model, inner, 4), "saved with sync_every=4, but this LocalSGD has 3"),
    ):
        error = error_of(into.load_state_dict, saved.state_dict())
        assert error.startswith("UsageError")
        assert said in error


def diverging(*, codec: str, value: float, delay: int) -> None:
    """Rank 1 gets a value that is not finite into the second fragment."""
    model = make_model()
    inner = sgd(model)
    with DiLoCo(list(model), inner, sgd(model, **PLAIN), 4, fragment_sync_delay=delay, codec=codec):
        if dist.get_rank() == 1:
            with torch.no_grad():
                list(model.parameters())[3][0] = value
        for _ in range(4):
            inner.zero_grad()
            inner.step()


@on_ranks(3)
def test_values_that_are_not_finite_and_different_settings_are_errors_at_all_ranks() -> None:
    rank, _ = begin("gloo")
    for codec, value, delay in (
        ("float32", np.nan, 0), ("bfloat16", -np.inf, 1), ("int8", np.nan, 0), ("int8", np.inf, 3),
    ):  # fmt: skip
        error = error_of(diverging, codec=codec, value=value, delay=delay)
        assert error.startswith("NonFiniteUpdate"), (codec, error)
        assert "fragment 1 (Linear)" in error
        assert ("1 of this rank's parameters are not finite" in error) == (rank == 1)
    model = make_model()
    assert error_of(DiLoCo([model], sgd(model), sgd(model, **PLAIN), 10 + rank).__enter__) == (
        "Disagreement: DiLoCo: sync_every is 10 at rank 0 and 11 at rank 1: all ranks must be given the same"
    )


class Bomb:
    """Stands for an object that is sent: whoever unpickles it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


HOSTILE: tuple[tuple[bytes, int | None, str], ...] = (
    (b"\x80\x04.", None, "what rank 1 has sent does not decode"),
    (b"\x90", None, "what rank 1 has sent does not decode: Expected `object`, got `array`"),
    (b"", 2**40, "rank 1 announces 1099511627776 bytes; expected 1 to 1048576"),
)
"""What rank 1 sends for its settings, which length it announces, and what the others say."""


@on_ranks(2)
def test_a_member_that_pickles_a_bomb_runs_no_code_in_others_and_bytes_that_do_not_decode_are_an_error(
    folder: str,
) -> None:
    rank, _ = begin("gloo")
    model = make_model(dtype=torch.float32)
    inner, outer = sgd(model), sgd(model, **PLAIN)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("site", "local"))
    beginnings: list[Callable[[], object]] = [
        DiLoCo([model], inner, outer, 10).__enter__,
        LocalSGD(model, inner, 10).__enter__,
        HFA(model, inner, 2, 2, mesh=mesh).__enter__,
        lambda: site_mesh(outer_backend="gloo"),
    ]
    to_tensor, bomb = dist.distributed_c10d._object_to_tensor, f"{folder}/ran"

    def bombed(_thing: object, *rest: Any) -> Any:
        return to_tensor(Bomb(bomb), *rest)

    with patch.object(dist.distributed_c10d, "_object_to_tensor", bombed if rank else to_tensor):
        assert [error_of(beginning) for beginning in beginnings] == [""] * 4
    dist.barrier()
    assert not Path(bomb).exists()

    gather = plain_values._all_gather
    for content, announced, said in HOSTILE:
        dist.destroy_process_group()  # ends what rank 1 still waits for
        begin("gloo", store=said)
        training = LocalSGD(model, inner, 10)
        if rank == 0:
            error = error_of(training.__enter__)
            assert error.startswith("ProtocolViolation")
            assert said in error
            continue

        def lie(mine: torch.Tensor, group: Any, announced: int | None = announced) -> list[torch.Tensor]:
            return gather(mine if announced is None else torch.full_like(mine, announced), group)

        with (
            patch.object(plain_values, "_encoded", lambda *_, content=content: content),
            patch.object(plain_values, "_all_gather", lie),
        ):
            error_of(training.__enter__)


@on_ranks(2)
def test_a_context_may_be_left_at_any_time() -> None:
    """Sums under way are applied. An exception loses them, and a checkpoint brings them back; between sums it
    loses nothing.
    """
    begin("gloo")
    model = make_model()
    inner = sgd(model)
    with DiLoCo([model], inner, sgd(model, **PLAIN), 4, fragment_sync_delay=2) as training:
        train(model, inner, range(1, 4))
        before = arrays(model.parameters())
    assert not np.allclose(before[0], arrays(model.parameters())[0])
    # The sum began after step 2, and the outer SGD has learning rate 1.
    assert_close(arrays(model.parameters()), task.averaged(start(), 2, steps=2, sync_every=2))
    train(model, inner, range(4, 9))
    assert training.steps == 3

    for delay in (2, 0):
        model = make_model()
        inner = sgd(model)
        training = DiLoCo([model], inner, sgd(model, **PLAIN), 4, fragment_sync_delay=delay)
        saved = training.state_dict()

        def leave(training: DiLoCo = training, model: Any = model, inner: Any = inner) -> None:
            with training:
                train(model, inner, range(1, 4))
                raise LookupError("the script's own")

        assert error_of(leave) == "LookupError: the script's own"
        dist.barrier()
        refused, again = error_of(training.state_dict), error_of(training.__enter__)
        if not delay:
            assert refused == again == ""
            training.__exit__(None, None, None)
            assert training.steps == 3
            continue
        assert refused.startswith("UsageError")
        assert again.startswith("UsageError")
        assert "fragment 0 (Sequential)" in refused
        training.load_state_dict(saved)
        with training:
            train(model, inner, range(1, 5))
        assert training.steps == 4


@on_ranks(3)
def test_a_group_trains_without_the_others() -> None:
    rank, _ = begin("gloo")
    group: Any = dist.new_group([0, 2])
    model = make_model(seed=rank)
    inner = sgd(model)

    def go() -> None:
        with DiLoCo([model], inner, sgd(model, **PLAIN), 2, group=group):
            train(model, inner, range(1, 5))

    error = error_of(go)
    if rank == 1:
        assert error.startswith("UsageError")
        assert "rank 1 is not a member" in error
        assert_close(arrays(model.parameters()), start(seed=1))
        return
    assert error == ""
    assert same_at_all_ranks(model.parameters(), group)
    assert not np.allclose(arrays(model.parameters())[0], start()[0])


@on_ranks(4)
def test_sharded_parameters_are_averaged_shard_by_shard() -> None:
    """Two sites of two ranks: FSDP2 shards the model inside a site, DiLoCo averages shards between sites."""
    begin("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "local"))
    site = mesh["site"].get_local_rank()
    model = make_model(seed=site)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["local"])
    inner, group = sgd(model), mesh["site"].get_group()
    outer = sgd(model, **NESTEROV)
    with DiLoCo(
        list(model), inner, outer, 6, group=group, fragment_sync_delay=2, codec="float32"
    ) as training:
        train(model, inner, range(1, 14), rank=site)
        training.load_global_parameters()
        parameters: list[Any] = list(model.parameters())
        values = arrays(part.full_tensor() for part in parameters)
    _, expected = task.simulate(
        start(), ranks=2, steps=13, sync_every=6, applied_at=(3, 6), outer=task.Outer(**NESTEROV), delay=2
    )
    assert_close(values, expected)
    assert sum(part.to_local().numel() for part in parameters) < sum(value.size for value in expected)


@on_ranks(3)
def test_ddps_hook_gives_what_ddp_gives_and_a_compressed_bucket_is_rounded_to_its_type() -> None:
    begin("gloo")

    def trained(hook: Any, *, steps: int = 1, own_group: bool = True) -> list[np.ndarray[Any, Any]]:
        model = DistributedDataParallel(make_model(dtype=torch.float32), bucket_cap_mb=0.0001)
        if hook is not None:
            model.register_comm_hook(NetStormHookState(dist.new_group() if own_group else None), hook)
        train(model, sgd(model), range(1, steps + 1))
        assert same_at_all_ranks(model.parameters())
        return arrays(model.parameters())

    expected = trained(None, steps=5)
    for own_group in (True, False):
        found = trained(netstorm_hook, steps=5, own_group=own_group)
        assert all(map(np.array_equal, found, expected))
    expected = trained(None)
    for wrapper, precision in ((fp16_compress_wrapper, 2**-11), (bf16_compress_wrapper, 2**-8)):
        found = trained(wrapper(netstorm_hook))
        largest = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
        assert 0 < largest < 20 * precision * LEARNING_RATE


def accuracy_on_digits(codec: str | None) -> float:
    """Train with DDP, or with DiLoCo under a codec; return the accuracy on a fifth that was kept out."""
    from sklearn.datasets import load_digits

    images, numbers = load_digits(return_X_y=True)
    order = np.random.default_rng(3).permutation(len(images))
    inputs = torch.tensor(images[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(numbers[order])
    held_out = len(inputs) // 5
    mine = slice(held_out + dist.get_rank(), None, dist.get_world_size())
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_on(network: nn.Module) -> None:
        for _ in range(30):
            for part, wanted in zip(inputs[mine].split(16), labels[mine].split(16), strict=True):
                inner.zero_grad()
                nn.functional.cross_entropy(network(part), wanted).backward()
                inner.step()

    if codec is None:
        train_on(DistributedDataParallel(model))
    else:
        settings: dict[str, Any] = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5, "codec": codec}
        with DiLoCo([model[0], model[2]], inner, sgd(model, **NESTEROV), 10, **settings) as training:
            train_on(model)
            training.sync()
            training.load_global_parameters()
    assert same_at_all_ranks(model.parameters())
    with torch.no_grad():
        right = model(inputs[:held_out]).argmax(dim=1) == labels[:held_out]
    return float(right.float().mean())


@pytest.mark.slow
@on_ranks(3)
def test_diloco_on_digits_is_within_a_point_of_ddp() -> None:
    begin("gloo")
    of_ddp = accuracy_on_digits(None)
    assert of_ddp > 0.95
    for codec in ("float32", "bfloat16", "int8"):
        assert accuracy_on_digits(codec) >= of_ddp - 0.01, codec
