"""A scheduler of several jobs with a log for each: what the next process goes on with, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import netstorm
from netstorm import clock
from netstorm.errors import UsageError
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.scheduler.process.hosted import plan_hosting
from netstorm.scheduler.replay_log import MAGIC
from netstorm.scheduler.several_jobs import SeveralJobs
from netstorm.scheduler.snapshot import JobPhase
from netstorm.settings import Settings
from tests.unit.scheduler.driving import RELEASE, refused
from tests.unit.scheduler.jobs.test_several_jobs import Several

if TYPE_CHECKING:
    from typing_extensions import Self


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


def test_two_schedulers_cannot_write_one_log(tmp_path):
    with Logged(tmp_path) as one, Logged(tmp_path) as other:
        one.start("a", 2)
        other.join("a/0")
        assert "in use by another scheduler" in other.why_refused("a/0")
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
