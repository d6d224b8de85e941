"""The scripts of GeoMX's techniques, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
SITES = ("--site", "a,a,b")


@pytest.mark.parametrize(
    ("launch", "script"),
    [
        ((*SITES, "--topology", "hierarchical"), ("hips.py",)),
        (SITES, ("hfa.py", "--k1", "3", "--k2", "2")),
        ((), ("esync.py", "--slow", "3")),
        (SITES, ("mixed_sync.py",)),
        pytest.param(
            SITES,
            ("mixed_sync_torch.py", "--slow", "2"),
            marks=pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
        ),
        ((), ("dcasgd.py", "-lr", "0.05")),
        ((), ("gradient_compression.py", "--type", "mpq", "--threshold", "0.05")),
    ],
    ids=lambda words: words[0].removesuffix(".py") if words else "",
)
def test_it_trains_an_epoch_on_three_nodes(launch: tuple[str, ...], script: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "netstorm", "launch", "-n", "3", *launch, "--", sys.executable]
    name, *arguments = script
    cpu = [] if name.endswith("_torch.py") else ["--cpu"]
    result = subprocess.run(
        [*command, str(ROOT / "examples" / "geomx" / name), *cpu, "-ep", "1", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    [right] = re.findall(r"\[Epoch 0\]\[Iteration \d+\] Test Acc (\d\.\d+)", result.stdout)
    assert 0.05 < float(right) <= 1
