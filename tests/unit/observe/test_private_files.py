"""Files that only their owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from netstorm.observe.private_files import write_private
from netstorm.observe.trace import Trace
from netstorm.scheduler.process.state_file import StateFile


@pytest.fixture(autouse=True)
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_its_owner_s_alone(tmp_path):
    write_private(tmp_path / "new", b"content")
    assert (mode_of(tmp_path / "new"), (tmp_path / "new").read_bytes()) == (0o600, b"content")


def test_a_file_that_others_could_read_is_closed_to_them_and_rewritten(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"longer than before")
    path.chmod(0o644)
    write_private(path, b"content")
    assert (mode_of(path), path.read_bytes()) == (0o600, b"content")


def test_a_device_is_left_as_it_is():
    before = mode_of(Path("/dev/null"))
    write_private(Path("/dev/null"), b"content")
    assert mode_of(Path("/dev/null")) == before


def test_traces_and_state_files_are_private(tmp_path):
    Trace(lambda: 0.0).write(tmp_path / "trace.json", 0, machine="m", cluster_offset_s=0.0)
    StateFile(tmp_path / "state", "job").close()
    assert mode_of(tmp_path / "trace.json") == 0o600
    assert mode_of(tmp_path / "state" / "job.log") == 0o600
