"""The templates in deploy/: what can be checked of them without their platforms."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from netstorm.settings import declarations

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_shell(text: str) -> None:
    parsed = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (parsed.returncode, parsed.stderr) == (0, "")


def test_all_settings_that_they_set_exist():
    known = {declaration.variable for declaration in declarations().values()}
    texts = {path: path.read_text() for path in DEPLOY.rglob("*") if path.is_file()}
    named = {
        (path.name, name)
        for path, text in texts.items()
        for name in re.findall(r"\b(?:NETSTORM|DMLC)_[A-Z_]+\b", text)
    }
    assert len(named) > 10
    assert {(path, name) for path, name in named if name not in known} == set()


def test_the_batch_script_and_the_task_for_skypilot_are_shell_and_yaml():
    check_shell((DEPLOY / "slurm/netstorm.sbatch").read_text())
    task = yaml.safe_load((DEPLOY / "skypilot/three-regions.yaml").read_text())
    check_shell(task["run"])
    assert set(task["envs"]) == {"SITE", "FIRST_RANK", "NODES", "SCHEDULER"}


def test_systemd_finds_nothing_wrong_in_its_units(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: apt install systemd")
    for unit in sorted((DEPLOY / "systemd").iterdir()):
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)  # NetStorm need not be in /opt
        verified = subprocess.run(
            ["systemd-analyze", "verify", str(tmp_path / unit.name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (verified.returncode, verified.stderr) == (0, ""), unit.name
