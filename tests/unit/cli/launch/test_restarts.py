"""What is started again, how often and when."""

from __future__ import annotations

import json

import pytest

from netstorm.cli.launch.job import Process, start_message, state_folder
from netstorm.cli.launch.shutdown import (
    SCHEDULER,
    Member,
    Report,
    RestartBudget,
    SendSignal,
    Shutdown,
    StartAgain,
)


def started(nodes: int = 3, **options) -> Shutdown:
    shutdown = Shutdown(nodes, grace_s=10.0, failure_timeout_s=20.0, **options)
    for member in [SCHEDULER, *range(nodes)]:
        shutdown.started(Member(member), 0.0)
    return shutdown


def reported(actions) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Report))


def test_the_wait_doubles_up_to_a_limit_and_begins_anew_after_a_minute():
    budget = RestartBudget(10)
    delays, now = [], 0.0
    for ran_for in (1, 1, 1, 1, 1, 1, 1, 1, 61):
        budget.started("a", now)
        now += ran_for
        planned = budget.after_failure("a", now)
        assert planned is not None
        delays.append(planned.delay_s)
        now = planned.at
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5]


def test_each_process_has_its_own_budget():
    budget = RestartBudget(1)
    assert budget.after_failure("a", 0.0) is not None
    assert budget.after_failure("a", 0.0) is None
    assert budget.after_failure("b", 0.0) is not None
    assert RestartBudget(0).after_failure("a", 0.0) is None


def test_a_node_of_an_elastic_job_is_started_again_and_the_others_are_left_alone():
    shutdown = started(restarts=2, fewest=1)
    actions = shutdown.exited(Member(1), 137, 5.0)
    assert reported(actions) == (
        "rank 1 was killed by SIGKILL; it is started again in 0.5 s (restart 1 of 2)"
    )
    assert (shutdown.deadline, shutdown.is_over, shutdown.may_start) == (5.5, False, True)
    assert shutdown.tick(5.4) == []
    assert shutdown.tick(5.5) == [StartAgain(Member(1), 1)]
    shutdown.started(Member(1), 5.5)
    assert shutdown.deadline is None
    for member in (0, 1, 2, SCHEDULER):
        assert shutdown.exited(Member(member), 0, 9.0) == []
    assert (shutdown.is_over, shutdown.exit_code, shutdown.summary()) == (True, 0, [])


def test_an_elastic_job_goes_on_without_a_node_that_fails_for_good_and_ends_without_enough():
    shutdown = started(3, fewest=2)
    assert reported(shutdown.exited(Member(1), 3, 1.0)) == (
        "rank 1 failed with exit code 3; the job goes on with 2 nodes"
    )
    assert shutdown.may_start
    assert "rank 2 failed with exit code 4; rank 0 has 20 s" in reported(shutdown.exited(Member(2), 4, 2.0))
    shutdown.exited(Member(0), 1, 3.0)
    shutdown.exited(SCHEDULER, 1, 3.0)
    assert (shutdown.is_over, shutdown.exit_code) == (True, 4)


def test_nobody_is_started_again_for_a_job_that_has_ended_well():
    shutdown = started(restarts=2, fewest=1)
    assert "is started again" in reported(shutdown.exited(Member(1), 137, 5.0))
    for member in (0, SCHEDULER):
        assert shutdown.exited(Member(member), 0, 5.1) == []
    assert shutdown.deadline is None
    assert "started again" not in reported(shutdown.exited(Member(2), 1, 5.2))
    assert (shutdown.is_over, shutdown.exit_code) == (True, 0)


def test_nodes_that_have_ended_well_count_as_enough():
    shutdown = started(2, fewest=1)
    shutdown.exited(Member(0), 0, 1.0)
    assert "goes on with 1 nodes" in reported(shutdown.exited(Member(1), 3, 2.0))
    shutdown.exited(SCHEDULER, 0, 3.0)
    assert (shutdown.is_over, shutdown.exit_code) == (True, 0)


def test_a_job_that_is_not_elastic_ends_with_its_first_failure():
    shutdown = started(restarts=5)
    assert "have 20 s to end by themselves" in reported(shutdown.exited(Member(1), 3, 1.0))
    assert shutdown.tick(2.0) == []


@pytest.mark.parametrize("code", [126, 127])
def test_a_command_that_cannot_be_run_is_not_tried_again(code):
    shutdown = started(restarts=5, fewest=3)
    shutdown.exited(Member(1), code, 1.0)
    assert shutdown.exit_code == code


def test_ctrl_c_ends_a_job_one_of_whose_nodes_is_about_to_be_started_again():
    shutdown = Shutdown(1, grace_s=10.0, failure_timeout_s=20.0, restarts=5, fewest=1)
    shutdown.started(Member(0), 0.0)  # the scheduler is somewhere else
    shutdown.exited(Member(0), 3, 1.0)
    assert not shutdown.is_over
    shutdown.stop_requested(2, 1.1)  # type: ignore[arg-type]
    assert (shutdown.is_over, shutdown.exit_code, shutdown.was_stopped) == (True, 130, True)
    assert shutdown.tick(2.0) == []


def test_a_failure_that_ends_the_job_ends_restarts_too():
    shutdown = started(3, restarts=1, fewest=3)
    shutdown.exited(Member(0), 3, 1.0)
    shutdown.tick(1.5)
    shutdown.started(Member(0), 1.5)
    shutdown.exited(Member(1), 3, 1.6)
    shutdown.exited(Member(0), 3, 1.7)
    assert shutdown.deadline == 21.7
    actions = shutdown.tick(21.7)
    assert [action.members for action in actions if isinstance(action, SendSignal)] == [(2,)]
    assert not any(isinstance(action, StartAgain) for action in actions)


def test_a_scheduler_that_is_killed_is_started_again_but_not_one_that_has_said_how_the_job_went():
    shutdown = started(2, restarts=1, scheduler_restarts=True)
    assert "the scheduler was killed by SIGKILL; it is started again" in reported(
        shutdown.exited(SCHEDULER, 137, 1.0)
    )
    assert shutdown.tick(1.5) == [StartAgain(SCHEDULER, 1)]
    shutdown.started(SCHEDULER, 1.5)
    shutdown.first_failure_reported(Member(0))
    assert "2 s to end" not in reported(shutdown.exited(SCHEDULER, 1, 2.0))
    assert not shutdown.may_start


def test_a_scheduler_is_not_started_again_for_nobody():
    shutdown = started(1, restarts=1, scheduler_restarts=True)
    shutdown.exited(SCHEDULER, 137, 1.0)
    shutdown.exited(Member(0), 0, 1.1)
    assert (shutdown.is_over, shutdown.deadline, shutdown.exit_code) == (True, None, 0)


def test_variables_reach_a_process_here_and_on_another_host():
    message = start_message(command=["x"], folder=None, variables={"A": "1"}, nodes_here=1)
    there = Process(member=Member(0), supervisor=("ssh",), environment={"B": "2"}, start_message=message)
    changed = there.with_variables({"C": "3"}, is_restart=True)
    assert json.loads(changed.start_message)["variables"] == {"A": "1", "C": "3"}
    assert (changed.environment, changed.is_restart) == ({"B": "2", "C": "3"}, True)


def test_each_attempt_has_a_log_of_its_own(tmp_path):
    assert state_folder({}, tmp_path, 0, is_local=True) == f"{tmp_path}/state"
    assert state_folder({}, tmp_path, 2, is_local=True) == f"{tmp_path}/state/restart-2"
    assert state_folder({}, tmp_path, 0, is_local=False) is None
    assert state_folder({"NETSTORM_STATE_DIR": "/s"}, tmp_path, 1, is_local=False) == "/s/restart-1"
