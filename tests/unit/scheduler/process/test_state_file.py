"""The file of a replay log: appending, locking, and what is refused."""

from __future__ import annotations

import errno
import os

import pytest

from netstorm.errors import UsageError
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.process import hosted as state_file
from netstorm.scheduler.process.hosted import StateFile, plan_hosting
from netstorm.settings import Settings
from tests.unit.scheduler.replay_log.sample_log import RECORDS, began


def test_a_file_is_gone_on_with_behind_its_last_whole_record(tmp_path):
    file = StateFile(tmp_path / "new" / "folder", "alexnet")
    assert file.replayed is None
    file.write(RECORDS)
    file.close()
    with file.path.open("ab") as torn:
        torn.write(b"\x50\0\0\0half a rec")
    again = StateFile(tmp_path / "new" / "folder", "alexnet")
    assert again.replayed is not None
    again.write([r.BarrierArrival(rank=0, number=0)])
    again.close()
    third = StateFile(tmp_path / "new" / "folder", "alexnet")
    assert third.replayed is not None
    assert third.replayed.barriers == [1, 0, 1]
    third.write([r.JobEnded(text="well")])
    third.close()
    fourth = StateFile(tmp_path / "new" / "folder", "alexnet")
    assert fourth.replayed is None
    assert fourth.path.read_bytes() == r.MAGIC
    fourth.close()


def test_two_schedulers_cannot_write_one_log(tmp_path):
    file = StateFile(tmp_path, "job")
    with pytest.raises(UsageError, match="in use by another scheduler"):
        StateFile(tmp_path, "job")
    file.close()
    StateFile(tmp_path, "job").close()


def test_a_log_from_before_the_machine_went_down_is_refused(tmp_path):
    file = StateFile(tmp_path, "alexnet")
    file.write([began(boot="another run")])
    file.close()
    with pytest.raises(UsageError, match="before this machine was last started"):
        StateFile(tmp_path, "alexnet")


def test_a_folder_that_is_none_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="NETSTORM_STATE_DIR="):
        StateFile(tmp_path / "file", "job")


def full(monkeypatch, room):
    """Let the disk have room for some bytes only."""
    write = os.write

    def write_some(file, data):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data[:room])
        room -= len(part)
        return write(file, part)

    monkeypatch.setattr(os, "write", write_some)


def test_a_disk_that_is_full_at_the_start_is_an_error_that_names_the_setting(tmp_path, monkeypatch):
    full(monkeypatch, 3)
    with pytest.raises(UsageError, match=r"NETSTORM_STATE_DIR=.*No space left on device"):
        StateFile(tmp_path, "job")


def test_a_disk_that_becomes_full_ends_the_log_and_not_the_job(tmp_path, monkeypatch, caplog):
    file = StateFile(tmp_path, "job")
    full(monkeypatch, 100)
    file.write(RECORDS)
    assert "No space left on device; the job goes on" in caplog.text
    assert "netstorm scheduler --recover" in caplog.text
    assert not file.path.exists()
    file.write(RECORDS)
    file.close()


def test_a_disk_that_becomes_read_only_does_not_end_the_job_and_the_log_says_what_to_do(
    tmp_path, monkeypatch, caplog
):
    file = StateFile(tmp_path, "job")
    full(monkeypatch, 0)

    def unlink(_, missing_ok):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(type(file.path), "unlink", unlink)
    file.write(RECORDS)
    assert "which lacks its end: remove it, which failed here (Read-only file system)" in caplog.text


def test_a_read_only_folder_is_an_error_that_names_the_setting(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(state_file, "open_private", refuse)
    with pytest.raises(UsageError, match=r"NETSTORM_STATE_DIR=.*Read-only file system.*can be written"):
        StateFile(tmp_path, "job")


def test_the_log_of_another_job_is_refused_and_named(tmp_path):
    file = StateFile(tmp_path, "alexnet")
    file.write(RECORDS)
    file.close()
    file.path.rename(tmp_path / "vgg.log")
    with pytest.raises(UsageError, match="is the log of job 'alexnet'"):
        StateFile(tmp_path, "vgg")


@pytest.mark.parametrize(("own", "job", "nodes"), [("a_b", "a_b", 2), ("a/b", "a_b", 3)])
def test_a_log_of_a_job_of_another_size_or_of_a_name_that_looks_like_it_is_refused(tmp_path, own, job, nodes):
    file = StateFile(tmp_path, own)
    file.write([began(job=own)])
    file.close()
    settings = Settings.from_environment({}, job=job, num_workers=nodes, state_dir=str(tmp_path))
    with pytest.raises(
        UsageError, match=f"is the log of job '{own}' with 3 ranks, but .* 'a_b' with {nodes}"
    ):
        plan_hosting(settings)
