"""DDP and DiLoCo under codecs, on real ranks: what they sum, keep, refuse, and survive."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.gradient_codecs import CodecHookState, codec_hook, hook_state_of
from netstorm.frontends.torch.local_updates import DiLoCo
from tests.integration.torch.begin import PATIENCE, begin, digest, error_of, gloo_group, same_at_all_ranks
from tests.integration.torch.elastic_ranks import Started
from tests.integration.torch.ranks import Ranks, on_ranks

BI_SPARSE: dict[str, Any] = {"type": "bsc", "size_lower_bound": 1}

BUCKET_MB = 0.3
"""Several buckets, one of which has small parameters of several layers."""


class Model(nn.Module):
    """Large matrices, small ones, a convolution, and parameters that a step leaves out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(96, 400, dtype=dtype)
        self.unused = nn.Linear(50, 50, dtype=dtype)
        self.middle = nn.Conv1d(1, 4, 3, padding=1, dtype=dtype)
        self.last = nn.Linear(1600, 30, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        middle = self.middle(self.first(inputs).tanh().unsqueeze(1)).flatten(1)
        result: torch.Tensor = self.last(middle)
        return result


def make(dtype: torch.dtype = torch.float32) -> tuple[Model, DistributedDataParallel]:
    torch.manual_seed(3)
    model = Model(dtype)
    return model, DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, find_unused_parameters=True)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [value.grad.clone() for value in model.parameters() if value.grad is not None]


def gradient(layer: nn.Linear) -> torch.Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Compute the gradients of a rank's batch."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 96, generator=generator).to(next(model.parameters()).dtype)
    model.zero_grad()
    model(inputs).square().mean().backward()


def exact(rank: int, ranks: int, dtype: torch.dtype, step: int) -> dict[str, torch.Tensor]:
    """Return the mean of the gradients of all ranks, which this process computes alone; by parameter."""
    found: dict[str, torch.Tensor] = {}
    for each in range(ranks):
        torch.manual_seed(3)
        model = Model(dtype)
        backward(model, each, step)
        for name, value in model.named_parameters():
            if value.grad is not None:
                found[name] = found.get(name, 0) + value.grad.double() / ranks
    return found


RULES = {"*.bias": "none", "first.*": {"type": "powersgd", "rank": 2}, "*": "int8"}

ROUNDED: dict[str, tuple[Any, float]] = {
    "none": ("none", 1e-6),
    "fp16": ("fp16", 1e-3),
    "bf16": ("bf16", 1e-2),
    "mpq": ({"type": "mpq", "size_lower_bound": 10_000, "momentum": 0}, 1e-3),
    "auto": ("auto", 1e-3),  # it may have chosen fp16
}
"""With the largest error of what was applied, beside what is kept."""

FED_BACK: dict[str, tuple[Any, float]] = {
    "int8": ("int8", 1e-5),
    "stochastic int8": ({"type": "int8", "rounding": "stochastic"}, 1e-5),
    "2bit": ({"type": "2bit", "threshold": 0.001}, 1e-5),
    "1bit": ("1bit", 1e-5),
    "topk": ("topk", 1e-5),
    "bsc": (BI_SPARSE | {"momentum": 0}, 1e-5),
    "powersgd": ("powersgd", 1e-5),
    "rules": (RULES, 1e-5),
}


def check_sums(cases: dict[str, tuple[Any, float]], kind: torch.dtype = torch.float32) -> None:
    """Averages of gradients and what codecs keep for later must be the mean of the gradients of all ranks."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), 3
    wanted: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for name, value in exact(rank, ranks, kind, step).items():
            wanted[name] = wanted.get(name, 0) + value
    for codec, (description, tolerance) in cases.items():
        model, trained = make(kind)
        state = CodecHookState(description, model)
        trained.register_comm_hook(state, codec_hook)
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        for step in range(steps):
            backward(trained, rank, step)
            averages: dict[str, Any] = {
                name: value.grad for name, value in model.named_parameters() if name in wanted
            }
            assert same_at_all_ranks(averages.values()), (codec, step)
            for name, average in averages.items():
                found[name] += average
        for name, kept in sorted(state.state_dict()["parameters"].items()):
            if name in wanted:
                rest = kept.get("residual", torch.zeros(1)).double()
                rest = rest.expand(wanted[name].numel()).reshape(wanted[name].shape).contiguous()
                dist.all_reduce(rest)
                error = float((found[name] + rest / ranks - wanted[name]).norm() / wanted[name].norm())
                assert error < tolerance, (codec, name, error)


@on_ranks(3)
def test_averages_and_what_is_kept_are_the_mean_of_all_gradients_and_the_same_bits_at_all_ranks() -> None:
    begin()
    check_sums({"rules": FED_BACK["rules"]})
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(3)
def test_averages_under_each_codec_are_right_and_the_same_bits_at_all_ranks() -> None:
    begin()
    check_sums(ROUNDED | FED_BACK)
    for kind in (torch.float16, torch.bfloat16):
        check_sums({name: (FED_BACK[name][0], 0.02) for name in ("int8", "powersgd")}, kind)
    dist.destroy_process_group()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.step()


def check_diloco(codecs: Iterable[Any], *, same: bool = True) -> None:
    """Train with DiLoCo under each codec, at a stretch and from a checkpoint."""
    rank = dist.get_rank()
    for codec in codecs:

        def start(codec: Any = codec) -> tuple[Any, Any, Any]:
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(96, 400), nn.Linear(400, 30))
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            training = DiLoCo(list(model), inner, outer, 2, fragment_sync_delay=1, codec=codec)
            return model, inner, training

        found = []
        for stop in (6, 3):
            model, inner, training = start()
            with training:
                train(model, inner, rank, range(stop))
                file = io.BytesIO()
                torch.save([each.state_dict() for each in (model, inner, training)], file)
            if stop < 6:
                model, inner, training = start()
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                for each, state in zip((model, inner, training), saved, strict=True):
                    each.load_state_dict(state)
                with training:
                    train(model, inner, rank, range(stop, 6))
            training.load_global_parameters()
            assert same_at_all_ranks(model.parameters()), codec
            found.append(digest(model))
        assert not same or found[0] == found[1], codec


def check_resumed(codecs: Iterable[Any]) -> None:
    """Train four steps at a stretch, and from a checkpoint with and without what the codec had kept."""
    rank = dist.get_rank()
    for codec in codecs:

        def start(codec: Any = codec) -> tuple[Any, Any, Any]:
            model, trained = make()
            state = CodecHookState(codec, trained)
            trained.register_comm_hook(state, codec_hook)
            return trained, torch.optim.SGD(model.parameters(), lr=0.1), state

        trained, optimizer, state = start()
        train(trained, optimizer, rank, range(2))
        file = io.BytesIO()
        torch.save({"model": trained.state_dict(), "codec": state.state_dict()}, file)
        train(trained, optimizer, rank, range(2, 4))
        found = [digest(trained)]
        for whole in (True, False):
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            trained, optimizer, state = start()
            trained.load_state_dict(saved["model"])
            if whole:
                state.load_state_dict(saved["codec"])
            train(trained, optimizer, rank, range(2, 4))
            found.append(digest(trained))
        whole_at_a_stretch, resumed, without = found
        assert resumed == whole_at_a_stretch, codec
        assert without != whole_at_a_stretch, codec
        assert same_at_all_ranks(trained.parameters()), codec


@on_ranks(2)
def test_training_that_goes_on_from_a_checkpoint_has_the_same_bits_also_with_diloco() -> None:
    begin()
    check_resumed([RULES])
    check_diloco([{"*.bias": "none", "0.*": "powersgd", "*": "int8"}])
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(2)
def test_training_under_each_codec_goes_on_from_a_checkpoint_with_the_same_bits() -> None:
    begin()
    check_resumed(["int8", "1bit", {"type": "topk", "momentum": 0.9, "warmup": 4}, BI_SPARSE, "powersgd"])
    check_diloco(
        ["none", "fp16", "bf16", {"type": "2bit", "threshold": 0.001}, "1bit", "topk", BI_SPARSE, "mpq"]
    )
    # The choice of "auto" goes by times, so a resumed training may choose otherwise; ranks choose alike.
    check_diloco([{"type": "auto", "every": 1}], same=False)
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(2)
def test_what_is_kept_goes_along_when_ddp_makes_its_buckets_anew() -> None:
    rank, ranks = begin()
    torch.manual_seed(3)

    class Swapped(nn.Module):
        """Its layers are not in the order in which gradients come."""

        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(300, 300)
            self.early = nn.Linear(300, 300)
            self.middle = nn.Linear(300, 300)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.late(self.middle(self.early(inputs)))
            return result

    model = Swapped()
    trained = DistributedDataParallel(model, bucket_cap_mb=0.5)
    state = CodecHookState({"late.*": "none", "*": {"type": "2bit", "threshold": 0.001}}, model)
    members: list[list[int]] = [[]]

    def count(bucket: Any) -> Any:
        members[-1].append(len(bucket.parameters()))
        return bucket

    trained.register_comm_hook(state, lambda state, bucket: codec_hook(state, count(bucket)))
    difference, total = torch.zeros_like(model.early.weight), 0.0
    for step in range(4):
        inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(inputs).square().mean().backward()
        mine = gradient(model.early).clone()
        dist.all_reduce(mine)
        model.zero_grad()
        trained(inputs).square().mean().backward()
        difference += gradient(model.early) - mine / ranks
        total += float(mine.norm())
        members.append([])
    rest = state.state_dict()["parameters"]["early.weight"]["residual"].view(300, 300)
    dist.all_reduce(rest)
    error = float((difference + rest / ranks).norm() / total)
    assert len(members[0]) != len(members[1])
    assert error < 1e-5
    dist.destroy_process_group()


@on_ranks(2, fails=True)
def test_misuse_says_what_is_wrong_and_what_to_do() -> None:
    rank, _ = begin()
    model, trained = make()

    def load(saved: Any) -> None:
        CodecHookState("int8", model).load_state_dict(saved)

    other_shape = CodecHookState("int8", nn.Linear(7, 7)).state_dict()
    other_shape["parameters"] = {"last.bias": {"gradients": torch.tensor(1), "residual": torch.zeros(3)}}
    single = DistributedDataParallel(nn.Linear(96, 2))
    single.register_comm_hook(CodecHookState("int8", model), codec_hook)
    for said, call, *arguments in (
        ("codec 'int4': expected one of auto, none, fp16", CodecHookState, "int4", model),
        ("ratio=2", CodecHookState, {"type": "topk", "ratio": 2}, model),
        ("matches none of '*.bias'; let '*' be the last one", CodecHookState, {"*.bias": "none"}, model),
        ("give the model, too", CodecHookState, {"*.bias": "none", "*": "int8"}),
        (
            "float64: codecs take float32, float16 and bfloat16; exempt it",
            CodecHookState,
            "int8",
            nn.Linear(3, 3, dtype=torch.float64),
        ),
        ("expected one of backend netstorm", CodecHookState, "int8", model, gloo_group()),
        ("expected what state_dict() of the same kind of object has returned", load, {"x": 1}),
        (
            "'x', which is no parameter of the model",
            load,
            {"parameters": {"x": {"gradients": torch.tensor(1)}}, "units": {}},
        ),
        ("residual of 'last.bias' has 3 elements, the model's parameter 30", load, other_shape),
        ("give it the same model", backward, single, rank, 0),
    ):
        assert said in (error := error_of(call, *arguments)), error
    trained.register_comm_hook(CodecHookState("int8" if rank else "fp16", model), codec_hook)
    error = error_of(backward, trained, rank, 0)
    for said in ("Disagreement", "codec *: int8 rounding=nearest", "codec *: fp16"):
        assert said in error


@on_ranks(2, NETSTORM_GRADIENT_CODEC='{"*.bias": "none", "*": "fp16"}')
def test_an_unedited_script_gets_the_codec_for_its_models_and_for_nothing_else() -> None:
    rank, ranks = begin()
    model, trained = make()
    backward(trained, rank, 0)
    wanted = exact(rank, ranks, torch.float32, 0)
    errors = [
        float((value.grad - wanted[name]).norm() / wanted[name].norm())
        for name, value in model.named_parameters()
        if value.grad is not None
    ]
    assert 1e-6 < max(errors) < 1e-3
    total = torch.full((1000,), 0.3)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    assert float(total.mean()) == pytest.approx(0.6, rel=1e-7)
    state = hook_state_of(trained)
    assert state is not None
    assert state.fingerprint == "*.bias: none; *: fp16"
    hook = error_of(trained.register_comm_hook, None, codec_hook)
    assert "NETSTORM_GRADIENT_CODEC, and DDP takes one hook only" in hook
    dist.destroy_process_group()


def test_a_wrong_setting_is_refused_before_the_job_begins(ranks: Ranks) -> None:
    ranks.start(begin, 1, NETSTORM_GRADIENT_CODEC="int4")
    ended = ranks.end(0)
    assert ended.code != 0
    assert "NETSTORM_GRADIENT_CODEC=" in ended.err.splitlines()[-1]


def elastic_training(folder: str, codec: Any) -> dict[str, Any]:
    """Train under a codec until the file "end" is in `folder`; weights are compared after every third
    step.
    """
    elastic.init_process_group(PATIENCE)
    model = elastic.data_parallel(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 8)), codec=codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    entries = {"model": model, "optimizer": optimizer, "ends": torch.zeros(1)}
    state = elastic.ElasticState(verify_every=3, repair=False, **entries)
    generator = torch.Generator().manual_seed(dist.get_rank())
    while not (step := state.step(), state["ends"].item())[1]:
        print(f"step {step} of {list(state.ranks)}", flush=True)
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=generator)).square().mean().backward()
        optimizer.step()
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    found = {"step": step, "parameters": digest(model)}
    dist.destroy_process_group()
    return found


def elastic_average(folder: str) -> None:
    """Average once rank 2 of three has died."""
    elastic.init_process_group(PATIENCE)
    rank = dist.get_rank()
    models = [elastic.data_parallel(nn.Linear(8, 8, bias=False), codec=codec) for codec in ("int8", "none")]
    for model in models:
        model(torch.ones(1, 8)).sum().backward()
    print("running", flush=True)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while elastic.live_ranks() != (0, 1):
        assert time.monotonic() < deadline, elastic.live_ranks()
        time.sleep(0.01)
    for model in models:
        model.zero_grad()
        model(torch.full((1, 8), float(rank + 1))).sum().backward()
        [average] = gradients(model)
        assert torch.allclose(average, torch.full_like(average, 1.5), rtol=0.02), average
    dist.destroy_process_group()


def test_training_under_a_codec_goes_on_when_a_rank_dies(job: Started) -> None:
    ranks = job(3, "1:3")
    options = {"codec": {"*.bias": "none", "0.*": "powersgd", "*": "int8"}}
    for rank in range(3):
        ranks.start(str(rank), rank, elastic_training, **options)
    ranks.wait_until_said("0", "step 3 ")
    ranks.kill("1")
    ranks.wait_until_said("0", "of [0, 2]")
    (ranks.folder / "end").touch()
    assert ranks.answer("0") == ranks.answer("2")
    ranks.end()


@pytest.mark.slow
def test_a_rank_that_joins_training_under_a_codec_ends_with_the_same_bits(job: Started) -> None:
    ranks = job(2, "1:3")
    options = {"codec": {"*.bias": "int8", "0.*": {"type": "auto", "every": 2}, "*": "topk"}}
    for rank in range(2):
        ranks.start(str(rank), rank, elastic_training, **options)
    ranks.wait_until_said("0", "step 3 ")
    ranks.start("new", 2, elastic_training, **options)
    ranks.wait_until_said("new", "of [0, 1, 2]")
    ranks.kill("1")
    ranks.wait_until_said("new", "of [0, 2]")
    (ranks.folder / "end").touch()
    assert ranks.answer("0") == ranks.answer("new")
    ranks.end()


@pytest.mark.slow
def test_an_average_is_over_the_ranks_that_are_in_the_job(job: Started) -> None:
    ranks = job(3, "2:3")
    for rank in range(3):
        ranks.start(str(rank), rank, elastic_average)
    for name in "012":
        ranks.wait_until_said(name, "running")
    ranks.kill("2")
    for name in "01":
        ranks.answer(name)
    ranks.end()
