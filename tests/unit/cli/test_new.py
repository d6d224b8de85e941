from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm.cli import new
from netstorm.cli.main import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["new", *arguments], prog_name="netstorm")


@pytest.mark.parametrize("framework", list(new.Framework))
def test_a_template_is_a_script_of_its_framework(framework, tmp_path):
    script = tmp_path / "my train.py"
    result = run(str(script), "--framework", framework.value)
    assert result.exit_code == 0, result.output
    text = script.read_text()
    compile(text, str(script), "exec")
    assert f"import {framework.value}" in text
    assert result.stdout.splitlines()[-1] == f"run it: netstorm launch -n 3 -- python '{script}'"


def test_a_file_that_is_there_is_only_overwritten_if_that_is_asked_for(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("mine\n" * 1000)
    refused = run(str(script))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"netstorm: {script} is there already: give another name, or --force\n"
    assert script.read_text().startswith("mine")
    assert run(str(script), "--force", "--framework", "numpy").exit_code == 0
    assert "mine\n" not in script.read_text()


def test_a_place_where_no_file_can_be_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "train.py"):
        refused = run(str(path), "--force")
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"netstorm: {path} cannot be written (")


@pytest.mark.parametrize("words", [["new"], ["keys", "new"]])
def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(words, tmp_path):
    """RLIMIT_FSIZE stands for the disk: the write fails once the file has been made."""
    limited = 'ulimit -f 0; trap \'\' XFSZ; exec "$0" -m netstorm "$@"'
    command = ["sh", "-c", limited, sys.executable, *words, "file"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("netstorm: file")
    assert "File too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_first_framework_that_is_installed_is_taken_and_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(new, "find_spec", lambda name: object() if name == "numpy" else None)
    result = run(str(tmp_path / "train.py"))
    assert "with NumPy\ninstall what it needs: pip install scikit-learn\n" in result.stdout
    monkeypatch.setattr(new, "find_spec", lambda _: None)
    result = run(str(Path(tmp_path / "other.py")), "--framework", "torch")
    assert "pip install 'netstorm[torch]' scikit-learn" in result.stdout
