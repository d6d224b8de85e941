"""A job of real processes under faults all the time, for a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("faults", ["kill,stop,cut", "kill,scheduler"])
def test_every_sum_is_right_while_processes_die_and_come_back(tmp_path: Path, faults: str) -> None:
    report = tmp_path / "churn.json"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "churn.py"),
            *("--nodes", "4", "--minutes", "0.3", "--seed", "11", "--faults", faults),
            *("--json", str(report)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["steps"] > 20
    # How many there are is up to the machine: none is killed while the killed are not back.
    assert found["recovery"].keys() == set(faults.split(","))
    assert all(kind["faults"] for kind in found["recovery"].values()), found["recovery"]
    print(json.dumps(found["recovery"]))
