"""The file of a replay log: appending, locking, and what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import netstorm
from netstorm import clock
from netstorm.errors import UsageError
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.process import hosted as state_file
from netstorm.scheduler.process.hosted import StateFile, plan_hosting
from netstorm.scheduler.replay_log import MAGIC
from netstorm.scheduler.several_jobs import SeveralJobs
from netstorm.scheduler.snapshot import JobPhase
from netstorm.settings import Settings
from tests.unit.scheduler.driving import RELEASE, refused
from tests.unit.scheduler.sample_log import RECORDS, began
from tests.unit.scheduler.test_several_jobs import Several

if TYPE_CHECKING:
    from typing_extensions import Self


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


def test_a_log_from_before_the_machine_went_down_is_refused(tmp_path):
    file = StateFile(tmp_path, "alexnet")
    file.write([began(boot="another run")])
    file.close()
    with pytest.raises(UsageError, match="before this machine was last started"):
        StateFile(tmp_path, "alexnet")


def test_a_disk_without_room_or_a_folder_that_is_none_is_an_error_that_names_the_setting(
    tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="NETSTORM_STATE_DIR="):
        StateFile(tmp_path / "file", "job")
    full(monkeypatch, 3)
    with pytest.raises(UsageError, match=r"NETSTORM_STATE_DIR=.*No space left on device"):
        StateFile(tmp_path, "job")

    def refuse(path, flags):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(state_file, "open_private", refuse)
    with pytest.raises(UsageError, match=r"NETSTORM_STATE_DIR=.*Read-only file system.*can be written"):
        StateFile(tmp_path, "job")


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


# ---------------------------------------------------------- a scheduler of several jobs with a log for each


@pytest.fixture(autouse=True)
def _release(monkeypatch):
    monkeypatch.setattr(netstorm, "__version__", RELEASE)


class Logged(Several):
    """As `Several`, with logs in a folder. Ends as a process that is killed does."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(**settings)
        own = {"jobs": 0, "topology": "fapt", "state_dir": str(folder), **settings}
        self.plan = plan_hosting(Settings.from_environment({}, **own))
        machine = self.plan.make_machine(Counters(), 9091)
        assert isinstance(machine, SeveralJobs)
        machine.on_first_policy, machine.on_form = self._form_first, self.formations.append
        machine.on_job_over = self.over.append
        self.machine, self.now = machine, clock.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.plan.close()


def test_the_next_process_knows_each_running_job_and_what_its_first_node_said(tmp_path):
    with Logged(tmp_path) as before:
        before.start("a", 2, NETSTORM_UNEVEN="join")
        before.start("b", 3)
        before.start("c", 1)
        before.say("c/0", m.Finished(last_rounds={}))
        before.say("c/0", m.Leave())
        before.run(0.0)
    with Logged(tmp_path) as after:
        assert after.phases() == {"a": JobPhase.RUNNING, "b": JobPhase.RUNNING}
        assert [after.machine.job(name).options.joins for name in "ab"] == [True, False]
        after.hello("a/1", sender=1)
        after.say("a/1", m.Resume(keys=(), begun=(), barriers=(), last_rounds=None, suspected=()))
        assert after.heard("a/1", m.Resumed)
        assert "does not know this rank 0" in refused(after.hello("c/0", sender=0))


def test_a_name_is_free_again_while_the_nodes_of_a_failed_job_are_told_why(tmp_path):
    with Logged(tmp_path) as before:
        before.start("a", 2)
        before.say("a/0", m.Failed(reason="x"))
        before.join("a/2", 0)
        before.join("a/3", 1)
        before.run(60.0)  # the failed one is over long ago; the heartbeats of the new one, too
    with Logged(tmp_path) as after:
        assert after.machine.jobs == ()
    with Logged(tmp_path) as before:
        before.start("a", 2)
        before.say("a/0", m.Failed(reason="x"))
        before.join("a/2", 0)
        before.join("a/3", 1)
        before.run(0.0)
    with Logged(tmp_path) as after:
        (job,) = after.machine.jobs
        assert {one.host for one in job.members} == {"a.2", "a.3"}


def test_of_several_jobs_a_log_in_use_keeps_one_job_out_and_no_other(tmp_path):
    with Logged(tmp_path) as one, Logged(tmp_path) as other:
        one.start("a", 2)
        other.join("a/0")
        assert "in use by another scheduler" in other.why_refused("a/0")
        with pytest.raises(UsageError, match="in use by another scheduler"):
            StateFile(tmp_path, "a")
        other.start("b", 2)
        assert other.phases() == {"b": JobPhase.RUNNING}


def test_a_log_that_is_damaged_is_left_and_the_others_go_on(tmp_path):
    with Logged(tmp_path) as before:
        before.start("a", 2)
    (tmp_path / "b.log").write_bytes(MAGIC + b"\x04\0\0\0\0\0\0\0oops" + bytes([1]) * 100)
    with Logged(tmp_path) as after:
        assert after.phases() == {"a": JobPhase.RUNNING}
        after.join("b/0")
        assert "is damaged at byte" in after.why_refused("b/0")


def test_a_folder_that_is_none_is_an_error_before_anything_listens(tmp_path):
    (tmp_path / "file").write_text("")
    settings = Settings.from_environment({}, jobs=0, state_dir=str(tmp_path / "file"))
    with pytest.raises(UsageError, match="NETSTORM_STATE_DIR="):
        plan_hosting(settings)
