"""PyTorch jobs save checkpoints in shares, are killed, and go on, also with another number of ranks."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import safetensors.torch
import torch
import torch.distributed as dist

from netstorm.checkpoint.jobs import wait_for_last_saving
from netstorm.frontends.torch import checkpoint
from tests.integration.forking import Forker
from tests.integration.torch.begin import begin, digest, error_of
from tests.integration.torch.ranks import Ranks, on_ranks

STEPS, SAVED = 6, 2


def _model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(0.2), torch.nn.Linear(40, 1)
    )


def train(path: str, save_at: int = -1) -> Any:
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
    for step in range(first, STEPS):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
        schedule.step()
        digests.append(digest(model))
        if step == save_at:
            own = {"rng": torch.get_rng_state()}
            checkpoint.save(path, {**objects, "step": step}, own=own, step=step)
    if save_at >= 0:
        wait_for_last_saving()
        print(json.dumps(digests), "are the digests", flush=True)
        signal.pause()
    dist.destroy_process_group()
    return {"first": first, "own": loaded is not None and loaded.own is not None, "digests": digests}


def run(forker: Forker, folder: Path, count: int, **arguments: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    with Ranks(forker, folder) as ranks:
        ranks.start(train, count, **arguments)
        return ranks.answers()


def test_a_job_that_was_killed_goes_on_bit_for_bit_from_its_checkpoint(forker: Forker, tmp_path: Path):
    path = str(tmp_path / "checkpoints")
    (tmp_path / "killed").mkdir()
    with Ranks(forker, tmp_path / "killed") as ranks:  # two: sums of three differ from run to run
        ranks.start(train, 2, path=path, save_at=SAVED)
        for rank in range(2):
            ranks.wait_until_said(rank, "are the digests")
        for rank in range(2):
            ranks.send(rank, signal.SIGKILL)
        undisturbed = json.loads(ranks.end(0).out.partition(" are")[0])
    assert len(set(undisturbed)) == STEPS

    expected = {"first": SAVED + 1, "own": True, "digests": undisturbed[SAVED + 1 :]}
    assert run(forker, tmp_path / "again", 2, path=path) == [expected, expected]

    (alone,) = run(forker, tmp_path / "alone", 1, path=path)
    assert (alone["first"], alone["own"]) == (SAVED + 1, False)
    assert len(alone["digests"]) == STEPS - SAVED - 1


@on_ranks(2)
def test_what_goes_wrong_is_said_at_every_rank(folder: str) -> None:
    rank, _ = begin()
    path, save = f"{folder}/checkpoints", checkpoint.save
    same = {"weight": torch.arange(1000.0)}
    assert "has no checkpoint" in error_of(checkpoint.load, path)
    plain = error_of(save, path, {**same, "epoch": rank})
    assert plain.startswith("Disagreement")
    assert "rank 0 and rank 1 give different numbers or texts" in plain
    shapes = error_of(save, path, {"weight": torch.zeros(rank + 1)})
    assert "tensors of different names, shapes or types" in shapes
    assert "step is 0 at rank 0 and 1 at rank 1" in error_of(save, path, same, step=rank)
    assert "weight is a sparse" in error_of(save, path, {"weight": torch.eye(3).to_sparse()})
    assert "own= needs shares=True" in error_of(save, path, same, own={}, shares=False)
    assert "keep=0: expected at least 1" in error_of(save, path, same, keep=0)
    # Ranks whose folders differ, as without a file system in common.
    apart = f"{path}/apart{rank}"
    said = error_of(save(apart, same, timeout_s=0.5).wait)
    assert said.startswith("WaitTimeout")
    if rank == 0:
        assert "no share of rank 1" in said
        assert "use shares=False" in said
    save(apart, same, shares=False).wait()
    dist.barrier()
    alone = error_of(checkpoint.load, apart)
    assert ("rank 1 cannot read the checkpoint", "does not exist")[rank] in alone
    loaded = checkpoint.load(apart, broadcast=True)
    assert loaded is not None
    assert loaded.state["weight"].sum().item() == 499500
    save(path, {"mean": torch.full((3,), float(rank)), **same}).wait()
    loaded = checkpoint.load(path)
    assert loaded is not None
    assert loaded.state["mean"].tolist() == [0, 0, 0]
    dist.destroy_process_group()


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


@on_ranks(2)
def test_pytorchs_own_checkpoint_calls_and_safetensors_read_a_checkpoint(folder: str) -> None:
    rank, _ = begin()
    path = f"{folder}/checkpoints"
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
    saved = checkpoint.save(path, state, own=noise, step=1).wait()
    dist.barrier()
    states = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()}
    expected = _flat(states)

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if "strange" not in name}
    into[f"own.{rank}.noise"] = torch.zeros(2, dtype=torch.int64)
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    by_dcp = {**expected, f"own.{rank}.noise": noise["noise"]}
    by_dcp = {name: tensor for name, tensor in by_dcp.items() if "strange" not in name}

    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = {file: safetensors.torch.load_file(saved / file) for file in index["weight_map"].values()}
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
    assert _differing(into, by_dcp) == []
    assert _differing(found, by_library) == []
    assert len(files) == 2
    assert _differing(_flat(loaded.state), expected) == []
    assert _differing(loaded.own, noise) == []
    dist.destroy_process_group()
