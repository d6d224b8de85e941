"""Scripts of others, unedited, over NetStorm, with tensors of the CPU in place of a GPU's. They are not in
this repository: PYTORCH_EXAMPLES and NANOGPT name the folders of pytorch/examples and karpathy/nanoGPT.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.integration.forking import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZE = ("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4")
LENGTH = ("--max_iters=4", "--eval_interval=4", "--eval_iters=2", "--gradient_accumulation_steps=2")
CPU = ("--dtype=float32", "--compile=False", "--dataset=numbers")


def copy_of(variable: str, inside: str, folder: Path) -> Path:
    """Return a copy of the script's folder, since scripts write beside themselves."""
    source = os.environ.get(variable)
    if source is None:
        pytest.skip(f"{variable} names no folder")
    return Path(shutil.copytree(Path(source) / inside, folder / "script", symlinks=False))


def output_of(folder: Path, script: str, *arguments: str) -> str:
    """Return what two ranks of a script print."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "tests.integration.torch.cpu_script", script, *arguments),
        ],
        cwd=folder,
        env={
            **os.environ,
            "NETSTORM_TORCH_BACKENDS": "nccl",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert "all nodes have finished" in ran.stdout, "the sums went another way"
    return ran.stdout


@pytest.mark.parametrize("script", ["multigpu_torchrun.py", "multinode.py"])
def test_pytorchs_tutorial_of_ddp_trains(tmp_path, script):
    folder = copy_of("PYTORCH_EXAMPLES", "distributed/ddp-tutorial-series", tmp_path)
    said = output_of(folder, script, "2", "1")
    for rank in range(2):
        assert f"[GPU{rank}] Epoch 1 | Batchsize: 32 | Steps: 32" in said
    assert "Epoch 1 | Training snapshot saved" in said


def test_nanogpts_loop_trains(tmp_path):
    folder = copy_of("NANOGPT", "", tmp_path)
    (folder / "data" / "numbers").mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(4000) % 60).astype(np.uint16).tofile(folder / "data/numbers" / name)
    said = output_of(folder, "train.py", *SIZE, *LENGTH, *CPU)
    assert "tokens per iteration will be: 256" in said
    assert "step 4: train loss" in said
