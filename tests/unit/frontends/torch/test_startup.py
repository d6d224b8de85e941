"""What a process says when it creates its first group."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.errors import UsageError
from netstorm.frontends.torch.startup import join_before_rendezvous, untested_version

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1+cu130", "2.13rc1", "2.9.1"])
def test_a_version_of_pytorch_that_is_tested_or_older_is_not_mentioned(version):
    assert untested_version(version) is None


@pytest.mark.parametrize("version", ["2.15.1+cu130", "2.15.0a0+git12", "3.0", "2.16rc1"])
def test_a_newer_version_of_pytorch_is_named_beside_the_one_that_is_tested(version):
    said = untested_version(version)
    assert said is not None
    assert said.startswith(f"PyTorch {version} is newer than 2.14")
    assert "pip install 'torch==2.14.*'" in said


def test_the_extra_takes_later_versions_than_the_one_that_scripts_install():
    assert '\ntorch = ["torch>=2.13", ' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "torch==2.13.*" in (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8").split()


def test_a_launched_job_has_no_group_that_changes_its_members():
    with pytest.raises(UsageError, match=r"under `netstorm launch`.* with torchrun or by hand"):
        join_before_rendezvous("netstorm", enable_reconfigure=True)
