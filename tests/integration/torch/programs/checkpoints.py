"""Programs of ranks that save and load checkpoints."""

from __future__ import annotations

import hashlib
import importlib
import json
import signal
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

from netstorm.checkpoint.jobs import wait_for_last_saving
from netstorm.frontends.torch import checkpoint
from tests.integration.torch.programs.begin import begin, error_of


def _model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(0.2), torch.nn.Linear(40, 1)
    )


def _digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.parameters():
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def train(path: str, steps: int, save_at: int = -1) -> Any:
    """Train from the newest checkpoint, if there is one; return digests of each step from then on.

    A job that saves a checkpoint waits at its end, to be killed.
    """
    rank, _ = begin()
    model = _model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.manual_seed(100 + rank)
    loaded = checkpoint.load(path, missing_ok=True)
    first = 0
    if loaded is not None:
        loaded.restore(objects)
        first = loaded.state["step"] + 1
        if loaded.own is not None:
            torch.set_rng_state(loaded.own["rng"])
    digests = []
    for step in range(first, steps):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
        schedule.step()
        digests.append(_digest(model))
        if step == save_at:
            own = {"rng": torch.get_rng_state()}
            checkpoint.save(path, {**objects, "step": step}, own=own, step=step)
    if save_at >= 0:
        wait_for_last_saving()
        print(json.dumps(digests), "are the digests", flush=True)
        signal.pause()
    dist.destroy_process_group()
    return {"first": first, "own": loaded is not None and loaded.own is not None, "digests": digests}


def misuse(path: str) -> Any:
    """Try what is refused."""
    rank, _ = begin()
    same = {"weight": torch.arange(1000.0)}
    found = {
        "none": error_of(lambda: checkpoint.load(path)),
        "plain": error_of(lambda: checkpoint.save(path, {**same, "epoch": rank})),
        "shapes": error_of(lambda: checkpoint.save(path, {"weight": torch.zeros(rank + 1)})),
        "step": error_of(lambda: checkpoint.save(path, same, step=rank)),
        "sparse": error_of(lambda: checkpoint.save(path, {"weight": torch.eye(3).to_sparse()})),
        "own": error_of(lambda: checkpoint.save(path, same, own={}, shares=False)),
        "keep": error_of(lambda: checkpoint.save(path, same, keep=0)),
    }
    # Ranks whose folders differ, as without a file system in common.
    apart = f"{path}/apart{rank}"
    saving = checkpoint.save(apart, same, timeout_s=0.5)
    found["apart"] = error_of(saving.wait)
    checkpoint.save(apart, same, shares=False).wait()
    dist.barrier()
    found["alone"] = error_of(lambda: checkpoint.load(apart))
    loaded = checkpoint.load(apart, broadcast=True)
    assert loaded is not None
    found["sent"] = loaded.state["weight"].sum().item()
    checkpoint.save(path, {"mean": torch.full((3,), float(rank)), **same}).wait()
    loaded = checkpoint.load(path)
    assert loaded is not None
    found["mean"] = loaded.state["mean"].tolist()
    dist.destroy_process_group()
    return found


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the tensors in a tree, by the names that they have in files."""
    if isinstance(tree, dict):
        return {key: one for name, item in tree.items() for key, one in _flat(item, f"{path}.{name}").items()}
    return {path[1:]: tree} if isinstance(tree, (torch.Tensor, np.ndarray)) else {}


def _differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of tensors that are not the same to the bit, or missing."""
    wrong = list(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        pair = [torch.as_tensor(one[name]).detach() for one in (found, expected)]
        kinds = [
            (type(one[name]) is np.ndarray, one[name].dtype, one[name].shape) for one in (found, expected)
        ]
        one, other = (tensor.reshape(-1).view(torch.uint8) for tensor in pair)
        wrong += [] if kinds[0] == kinds[1] and torch.equal(one, other) else [name]
    return wrong


def read_by_others(path: str) -> dict[str, list[str]]:
    """Save, and have PyTorch's own checkpoint calls and safetensors read it; return what is wrong."""
    rank, _ = begin()
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    odd: dict[str, Any] = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.full((2,), 1j, dtype=torch.complex64),
        "tiny": torch.tensor([-2, 0.5]).to(torch.float8_e4m3fn),
        "bits": torch.tensor([[1, 2]], dtype=torch.uint16),
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 2),
    }
    strange: dict[str, Any] = {
        "wide": torch.full((2, 1), 2 - 1j, dtype=torch.complex128),
        "scales": torch.ones(3).to(torch.float8_e8m0fnu),
        "array": np.arange(3.0),
    }
    noise = {"noise": torch.full((2,), rank)}
    state = {"model": model, "optimizer": optimizer, "odd": odd, "strange": strange}
    folder = checkpoint.save(path, state, own=noise, step=1).wait()
    dist.barrier()
    states = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()}
    expected = _flat(states)

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if "strange" not in name}
    into[f"own.{rank}.noise"] = torch.zeros(2, dtype=torch.int64)
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    by_dcp = {**expected, f"own.{rank}.noise": noise["noise"]}
    by_dcp = {name: tensor for name, tensor in by_dcp.items() if "strange" not in name}

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: safetensors.torch.load_file(folder / file) for file in index["weight_map"].values()}
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    by_library = {
        **expected,
        "strange.wide": torch.view_as_real(strange["wide"]),
        "strange.scales": torch.full((3, 1), 127, dtype=torch.uint8),
        "strange.array": torch.as_tensor(strange["array"]),
        **{f"own.{other}.noise": torch.full((2,), other) for other in range(2)},
    }
    loaded = checkpoint.load(path)
    assert loaded is not None
    dist.destroy_process_group()
    return {
        "dcp": _differing(into, by_dcp),
        "safetensors": _differing(found, by_library),
        "files": [f"{len(files)} files"] if len(files) != 2 else [],
        "netstorm": _differing(_flat(loaded.state), expected),
        "own": _differing(loaded.own, noise),
    }
