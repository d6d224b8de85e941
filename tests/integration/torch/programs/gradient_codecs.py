"""DDP under codecs: sums, checkpoints, misuse, and what unedited scripts get."""

from __future__ import annotations

import functools
import hashlib
import io
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.gradient_codecs import CodecHookState, codec_hook, hook_state_of
from netstorm.frontends.torch.local_updates import DiLoCo
from tests.integration.torch.programs.begin import PATIENCE, begin, error_of, same_at_all_ranks

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


def sums(codecs: dict[str, Any], tolerances: dict[str, float], dtype: str = "float32") -> list[str]:
    """Return what is wrong with averages of gradients: what was applied, and what codecs keep for later, must
    be the mean of the gradients of all ranks.
    """
    rank, ranks = begin()
    kind, wrong, steps = getattr(torch, dtype), [], 3
    wanted: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for name, value in exact(rank, ranks, kind, step).items():
            wanted[name] = wanted.get(name, 0) + value
    for codec, description in codecs.items():
        model, trained = make(kind)
        state = CodecHookState(description, model)
        trained.register_comm_hook(state, codec_hook)
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        for step in range(steps):
            backward(trained, rank, step)
            averages = {name: value.grad for name, value in model.named_parameters() if name in wanted}
            if not same_at_all_ranks([value for value in averages.values() if value is not None]):
                wrong.append(f"{codec}: ranks differ in step {step}")
            for name, average in averages.items():
                assert average is not None
                found[name] += average
        for name, kept in sorted(state.state_dict()["parameters"].items()):
            if name in wanted:
                rest = kept.get("residual", torch.zeros(1)).double()
                rest = rest.expand(wanted[name].numel()).reshape(wanted[name].shape).contiguous()
                dist.all_reduce(rest)
                error = float((found[name] + rest / ranks - wanted[name]).norm() / wanted[name].norm())
                if not error < tolerances[codec]:
                    wrong.append(f"{codec}: {name} is off by {error}")
    dist.destroy_process_group()
    return wrong


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.step()


def digest(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    ).hexdigest()


def resumed(codecs: list[Any]) -> list[list[str]]:
    """Return for each codec the digests of weights after four steps: at a stretch, and from a checkpoint with
    and without what the codec had kept.
    """
    rank, _ = begin()
    answers = []
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
        answers.append(found)
    dist.destroy_process_group()
    return answers


def rebuilt(codec: Any) -> tuple[list[int], float]:
    """Train a model whose buckets DDP makes anew; return the numbers of buckets in the first steps, and by
    how much what was applied and what is kept differ from the mean of all gradients.
    """
    rank, ranks = begin()
    torch.manual_seed(3)
    names = ["late", "early"]  # not in the order in which gradients come

    class Swapped(nn.Module):
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
    state = CodecHookState({f"{names[0]}.*": "none", "*": codec}, model)
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
    dist.destroy_process_group()
    return [len(each) for each in members], error


def refusals() -> dict[str, str]:
    """Return what misuse says."""
    rank, _ = begin()
    gloo = dist.new_group(backend="gloo", timeout=PATIENCE)
    model, trained = make()
    double = nn.Linear(3, 3, dtype=torch.float64)
    saved = CodecHookState("int8", nn.Linear(7, 7)).state_dict()
    saved["parameters"] = {"last.bias": {"gradients": torch.tensor(1), "residual": torch.zeros(3)}}
    alien = {"parameters": {"x": {"gradients": torch.tensor(1)}}, "units": {}}
    state = functools.partial(CodecHookState, "int8", model)
    found = {
        "name": error_of(lambda: CodecHookState("int4", model)),
        "parameter": error_of(lambda: CodecHookState({"type": "topk", "ratio": 2}, model)),
        "pattern": error_of(lambda: CodecHookState({"*.bias": "none"}, model)),
        "no names": error_of(lambda: CodecHookState({"*.bias": "none", "*": "int8"})),
        "double": error_of(lambda: CodecHookState("int8", double)),
        "gloo": error_of(lambda: CodecHookState("int8", model, gloo)),
        "no state": error_of(lambda: state().load_state_dict({"x": 1})),
        "other model": error_of(lambda: state().load_state_dict(alien)),
        "other shape": error_of(lambda: state().load_state_dict(saved)),
    }
    single = DistributedDataParallel(nn.Linear(96, 2))
    single.register_comm_hook(CodecHookState("int8", model), codec_hook)
    found["hook of another model"] = error_of(lambda: backward(single, rank, 0))
    trained.register_comm_hook(CodecHookState("int8" if rank else "fp16", model), codec_hook)
    found["different"] = error_of(lambda: backward(trained, rank, 0))
    return found


def unedited() -> dict[str, Any]:
    """Train as a script that knows nothing of codecs."""
    rank, ranks = begin()
    model, trained = make()
    backward(trained, rank, 0)
    wanted, error = exact(rank, ranks, torch.float32, 0), 0.0
    for name, value in model.named_parameters():
        if value.grad is not None:
            error = max(error, float((value.grad - wanted[name]).norm() / wanted[name].norm()))
    total = torch.full((1000,), 0.3)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    state = hook_state_of(trained)
    found = {
        "error": error,
        "all_reduce": float(total.mean()),
        "codec": state and state.fingerprint,
        "hook": error_of(lambda: trained.register_comm_hook(None, codec_hook)),
    }
    dist.destroy_process_group()
    return found


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


def elastic_average(folder: str, codec: Any) -> list[float]:
    """Average once rank 2 of three has died; return the smallest and the largest gradient."""
    elastic.init_process_group(PATIENCE)
    rank = dist.get_rank()
    layer = nn.Linear(8, 8, bias=False)
    model = elastic.data_parallel(layer, codec=codec)
    model(torch.ones(1, 8)).sum().backward()
    print("running", flush=True)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while elastic.live_ranks() != (0, 1):
        assert time.monotonic() < deadline, elastic.live_ranks()
        time.sleep(0.01)
    layer.zero_grad()
    model(torch.full((1, 8), float(rank + 1))).sum().backward()
    assert layer.weight.grad is not None
    found = [float(layer.weight.grad.min()), float(layer.weight.grad.max())]
    dist.destroy_process_group()
    return found


def outer_gradients(codecs: list[Any]) -> list[list[str]]:
    """Train with DiLoCo under each codec, at a stretch and from a checkpoint; return digests of both."""
    rank, _ = begin()
    answers = []
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
            found.append(digest(model))
        answers.append(found)
    dist.destroy_process_group()
    return answers
