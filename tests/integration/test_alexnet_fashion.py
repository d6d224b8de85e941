"""AlexNet with the paper's settings, on files of Fashion-MNIST's format: scikit-learn's digits, enlarged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "alexnet_fashion.py"


def write_files(folder: Path, train: int, test: int) -> None:
    """Write the four IDX files."""
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    images = np.kron(digits.images * 15, np.ones((1, 4, 4)))[:, 2:-2, 2:-2].astype(np.uint8)
    for part, rows in (("train", slice(0, train)), ("t10k", slice(train, train + test))):
        for name, values in (
            ("images-idx3", images[rows]),
            ("labels-idx1", digits.target[rows].astype(np.uint8)),
        ):
            header = bytes((0, 0, 8, values.ndim)) + b"".join(
                size.to_bytes(4, "big") for size in values.shape
            )
            (folder / f"{part}-{name}-ubyte").write_bytes(header + values.tobytes())


@pytest.mark.parametrize("framework", ["mxnet", "torch"])
def test_alexnet_learns_with_the_papers_settings(framework: str, tmp_path: Path) -> None:
    write_files(tmp_path, 1280, 200)
    report = tmp_path / "report.json"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "netstorm", "launch", "-n", "2", "--", sys.executable, EXAMPLE),
            *("--framework", framework, "--data-dir", tmp_path, "--image-size", "63", "--epochs", "2"),
            *("--json", report, "--digest"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    written = json.loads(report.read_text())
    chosen = {name: written["options"][name] for name in ("model", "optimizer", "lr", "batch_size")}
    assert chosen == {"model": "alexnet", "optimizer": "adam", "lr": 1e-4, "batch_size": 32}
    assert written["epochs"][-1]["accuracy"] > 0.2, written["epochs"]  # by chance .1
    assert len({line.split()[-1] for line in result.stdout.splitlines() if "sha256" in line}) == 1
