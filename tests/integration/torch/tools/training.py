"""Scripts as users of PyTorch's tools write them, run by two ranks, and what each reports of its training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]

RANKS = 2
DEADLINE_S = 240
END_S = 60
"""torchrun ends its ranks within 30 s of a SIGTERM."""

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    f"--nproc-per-node={RANKS}",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1",
)

REPORT = """
import hashlib, json, os, sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

backend, folder = sys.argv[1], Path(sys.argv[2])
deadline = timedelta(seconds=120)
torch.manual_seed(7)

def files(directory):
    dist.barrier()  # rank 0 writes them
    return sorted(path.name for path in directory.iterdir())

def report(model, losses, **more):
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    told = {"backend": dist.get_backend(), "losses": losses, "digest": digest.hexdigest(), **more}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
"""
"""What the scripts begin with."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What two ranks have reported."""

    reports: list[dict[str, Any]]
    said: str

    def backends(self) -> set[str]:
        """Return the backends that the ranks' default groups had."""
        return {report["backend"] for report in self.reports}

    def losses(self) -> list[list[float]]:
        """Return each rank's losses, by rank and step."""
        return [report["losses"] for report in self.reports]

    def digests(self) -> set[str]:
        """Return the different digests of the ranks' weights: one, if they are equal."""
        return {report["digest"] for report in self.reports}


def installed(name: str, package: str) -> pytest.MarkDecorator:
    """Return the mark that skips tests where a tool or PyTorch is not installed."""
    missing = [one for one in ("torch", package) if find_spec(one) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f'{name}: no {" and no ".join(missing)}; pip install "netstorm[torch-tools]"'
    )


def train(
    folder: Path, script: str, backend: str, *, way: tuple[str, ...] = TORCHRUN, **variables: str
) -> Trained:
    """Run a script at two ranks, and return what they report."""
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(REPORT + script)
    process = subprocess.Popen(
        [sys.executable, *way, str(path), backend, str(folder)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",  # the same on a machine with a GPU
            "HF_HUB_OFFLINE": "1",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # with its ranks, which a SIGKILL would leave
        said, _ = process.communicate(timeout=END_S)
        pytest.fail(f"{script.strip().splitlines()[0]}: no end within {DEADLINE_S} s\n{said}")
    assert process.returncode == 0, said
    return Trained(
        reports=[json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)], said=said
    )


def assert_same_training(netstorm: Trained, gloo: Trained) -> None:
    """Assert that ranks over NetStorm have learned as over Gloo, and end with equal weights."""
    assert gloo.backends() == {"gloo"}
    assert netstorm.backends() == {"netstorm"}
    for ours, theirs in zip(netstorm.losses(), gloo.losses(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert sum(ours[-3:]) < 0.75 * sum(ours[:3])
    assert len(netstorm.digests()) == 1
