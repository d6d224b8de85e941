"""Scripts as MXNet's users have them, unedited, through `netstorm.run`: examples/unedited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "unedited"


def run(nodes: int, script: str, *arguments: str) -> dict[str, list[str]]:
    """Run a script on all nodes; return what follows each first word that they print, node by node."""
    launch = [sys.executable, "-m", "netstorm", "launch", "-n", str(nodes), "--"]
    result = subprocess.run(
        [*launch, sys.executable, "-m", "netstorm.run", script, *arguments],
        cwd=SCRIPTS,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    printed: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        rank, _, text = line.partition("] ")
        if rank[1:].isdigit() and text:
            word, _, rest = text.partition(" ")
            printed.setdefault(word, []).append(rest)
    assert len(printed["weights"]) == nodes
    assert len(set(printed["weights"])) == 1, printed["weights"]
    return printed


def test_module_fit_trains_with_schedules_and_callbacks_by_the_number_of_workers() -> None:
    printed = run(3, "train_digits.py", "--kv-store", "dist_sync", "--num-epochs", "3")
    assert min(map(float, printed["accuracy"])) > 0.8


def test_a_checkpoint_of_three_nodes_is_resumed_by_two(tmp_path: Path) -> None:
    prefix = str(tmp_path / "checkpoint")
    options = ["--network", "conv", "--optimizer", "adam", "--lr", "0.01", "--model-prefix", prefix]
    first = run(
        3,
        "train_digits.py",
        "--kv-store",
        "dist_device_sync",
        "--devices",
        "2",
        "--num-epochs",
        "2",
        *options,
    )
    later = ("--num-epochs", "3", "--load-epoch", "2")
    resumed = run(2, "train_digits.py", "--kv-store", "dist_sync", *later, *options)
    assert float(resumed["accuracy"][0]) > 0.7
    assert first["weights"][0] != resumed["weights"][0]


def test_a_gluon_trainer_trains_on_several_devices_and_reads_its_states_again(tmp_path: Path) -> None:
    options = ("--devices", "2", "--hybridize", "--save", str(tmp_path / "states"))
    printed = run(3, "gluon_digits_classification.py", "--kvstore", "dist_sync", *options)
    assert min(map(float, printed["accuracy"])) > 0.8


def test_a_language_model_trains_with_its_gradients_clipped_by_their_global_norm() -> None:
    printed = run(3, "word_language_model.py", "--kvstore", "dist_sync")
    assert "weights" in printed
