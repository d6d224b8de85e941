"""The study of call paths: what counts as a call, and as a change of file; not how many there are today."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

call_path: Any = importlib.import_module("benchmarks.studies.call_path")


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    """Functions of three files: `a` calls itself and `outside`, which calls `b`."""
    texts = {
        "b": "def leaf(): return [one for one in (1, 2)]\n",
        "outside": "def through(): return leaf()\n",
        "a": "def begin(): inner(); through()\ndef inner(): return (lambda: 1)()\n",
    }
    names: dict[str, Any] = {}
    for name, text in texts.items():
        exec(compile(text, str(tmp_path / name), "exec"), names)
    return names


def test_calls_of_counted_files_are_counted_and_those_whose_caller_is_in_another_one(toy, tmp_path):
    files = {str(tmp_path / "a"), str(tmp_path / "b")}
    trace = call_path.Trace(files)
    with trace.recording():
        toy["begin"]()
    toy["begin"]()
    assert trace.files == files
    # begin, inner and its lambda, and leaf, which is called from `a` through a file that does not count
    assert trace.counts() == {"calls": 4, "files": 2, "changes": 2}


def test_what_only_the_simulation_imports_is_not_counted(monkeypatch, tmp_path):
    texts = {
        "simulation": "from netstorm import van, session\n",
        "van": "from netstorm import frames_in_memory\n",
        "frames_in_memory": "from netstorm import session\n",
        "session": "",
        "job": "from netstorm import session\n",
    }
    (tmp_path / "netstorm").mkdir()
    for name, text in texts.items():
        (tmp_path / "netstorm" / f"{name}.py").write_text(text)
    house = importlib.import_module("scripts.house")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert {Path(file).stem for file in call_path.job_files()} == {"session", "job"}


def test_each_operation_has_calls_of_several_files(capsys):
    assert call_path.main([]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert list(counts) == ["submit", "allreduce", "crash"]
    for found in counts.values():
        assert found["calls"] > found["changes"] > found["files"] > 1
