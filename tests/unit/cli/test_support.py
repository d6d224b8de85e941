"""What subcommands share."""

from __future__ import annotations

import os
import tempfile

import pytest

from netstorm.cli.support import (
    BEGUN,
    PREFIX,
    came_line,
    first_failure,
    first_failure_line,
    rank_that_came,
    scratch_folder,
)

# -------------------------------------------------------------------------------------------- launcher lines


@pytest.mark.parametrize("rank", [-1, 0, 4711])
def test_the_launcher_reads_what_the_scheduler_writes(rank):
    text = "job 'default' has failed: rank 2 (10.0.0.7:4242) failed: ValueError: ü"
    assert first_failure(first_failure_line(rank, text).encode()) == (rank, text)
    assert rank_that_came(came_line(abs(rank)).encode()) == abs(rank)


@pytest.mark.parametrize(
    "line", ["", "netstorm-verdict", "netstorm-verdict one x", " netstorm-verdict 1 x", BEGUN]
)
def test_other_output_is_no_such_line(line):
    assert first_failure(line.encode()) is None
    assert rank_that_came(line.encode()) is None


# --------------------------------------------------------------------------------------------------- scratch


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_goes_with_its_command_and_all_that_is_in_it(temporary):
    with scratch_folder() as folder:
        assert folder.parent == temporary
        (folder / "scheduler").write_text("127.0.0.1:9091")
    assert [*temporary.iterdir()] == []


def test_what_nobody_has_locked_is_removed_and_what_is_used_is_not(temporary):
    stale = temporary / f"{PREFIX}stale"
    stale.mkdir()
    (stale / "scheduler").touch()
    with scratch_folder() as used, scratch_folder() as second:
        assert sorted(temporary.iterdir()) == sorted([used, second])


def test_files_links_and_folders_of_other_names_stay(temporary):
    elsewhere = temporary / "mine"
    elsewhere.mkdir()
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    before = sorted(temporary.iterdir())
    with scratch_folder():
        pass
    assert sorted(temporary.iterdir()) == before


def test_folders_of_other_users_stay(temporary, monkeypatch):
    theirs = temporary / f"{PREFIX}theirs"
    theirs.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    with scratch_folder():
        assert theirs.exists()
