"""Jobs of the launcher: what is started where, and started again."""

from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from netstorm.cli.launch.hosts import passed_on, place, remote_job, through_ssh
from netstorm.cli.launch.job import CommandError, Process, find_command, start_message, state_folder
from netstorm.cli.launch.local_job import local_job, users_environment
from netstorm.cli.launch.remote import environment_here
from netstorm.cli.launch.shutdown import (
    SCHEDULER,
    Member,
    Report,
    RestartBudget,
    SendSignal,
    Shutdown,
    StartAgain,
)
from netstorm.cli.launch.variables import threads_each
from netstorm.errors import SettingsError, UsageError

# ------------------------------------------------------------------------------------------------------ jobs


def local(
    size: int = 2,
    *,
    environment=None,
    port: int = 0,
    sites=None,
    ready_file: Path | None = None,
    scheduler_host: str = "127.0.0.1",
):
    return local_job(
        size=size,
        command=["python", "train.py"],
        folder=Path("/data"),
        environment={"PATH": "/bin"} if environment is None else environment,
        port=port,
        sites=sites or [None] * size,
        ready_file=ready_file,
        scheduler_host=scheduler_host,
        torch_port=lambda: 29_000,
    )


def over_ssh(text: str = "tokyo\nalice@paris site=west", **changes):
    options = {
        "placements": place(text, "hosts"),
        "command": ["python", "train.py", "a b", "$HOME", "it's"],
        "folder": "/data/my runs",
        "variables": {"LR": "0.1 $x"},
        "scheduler_host": None,
        "port": 9091,
        "python": "/opt/my python/bin/python",
        "connect": partial(through_ssh, ["ssh"]),
        "with_scheduler": True,
    }
    return remote_job(**{**options, **changes})


# -------------------------------------------------------------------------------------------- on this machine


def test_nodes_that_join_a_scheduler_elsewhere_are_told_where_it_is():
    job = local(scheduler_host="tokyo", port=9095)
    assert job.scheduler is None
    for node in job.nodes(None):
        assert node.environment["DMLC_PS_ROOT_URI"] == "tokyo"
        assert node.environment["DMLC_PS_ROOT_PORT"] == "9095"


def test_each_node_is_told_its_rank_and_where_the_scheduler_is():
    first, second = local(sites=["east", "west"]).nodes(1234)
    assert second.environment["DMLC_ROLE"] == "worker"
    assert second.environment["DMLC_PS_ROOT_URI"] == "127.0.0.1"
    assert second.environment["DMLC_PS_ROOT_PORT"] == "1234"
    assert second.environment["DMLC_NUM_WORKER"] == "2"
    assert (first.environment["NETSTORM_RANK"], second.environment["NETSTORM_RANK"]) == ("0", "1")
    assert (first.environment["NETSTORM_SITE"], second.environment["NETSTORM_SITE"]) == ("east", "west")
    assert json.loads(second.start_message) == {"command": ["python", "train.py"], "folder": "/data"}


def test_pytorch_finds_the_same_rank_and_all_ranks_the_same_rank_0():
    first, second = local().nodes(1234)
    assert [node.environment["RANK"] for node in (first, second)] == ["0", "1"]
    assert [node.environment["LOCAL_RANK"] for node in (first, second)] == ["0", "1"]
    for node in (first, second):
        assert node.environment["WORLD_SIZE"] == node.environment["LOCAL_WORLD_SIZE"] == "2"
        assert node.environment["MASTER_ADDR"] == "127.0.0.1"
        assert node.environment["MASTER_PORT"] == "29000"


def test_the_users_own_port_for_pytorch_wins():
    node, _ = local(environment={"PATH": "/bin", "MASTER_PORT": "4444"}).nodes(None)
    assert (node.environment["MASTER_ADDR"], node.environment["MASTER_PORT"]) == ("127.0.0.1", "4444")


def test_what_torchrun_has_set_for_another_job_does_not_reach_the_nodes(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "7")
    environment = users_environment({"MASTER_ADDR": "10.0.0.1"})
    assert environment.keys().isdisjoint({"TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT", "RANK"})
    assert environment["MASTER_ADDR"] == "10.0.0.1"


def test_the_cores_are_shared_out_unless_the_user_has_chosen():
    cores = len(os.sched_getaffinity(0))
    assert local(1).nodes(None)[0].environment["OMP_NUM_THREADS"] == str(cores)
    assert local(2).nodes(None)[0].environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert local(environment={"OMP_NUM_THREADS": "7"}).nodes(None)[0].environment["OMP_NUM_THREADS"] == "7"
    assert threads_each(10_000) == 1


def test_nodes_on_this_machine_advertise_loopback_and_write_without_a_buffer():
    environment = users_environment({})
    assert environment["DMLC_NODE_HOST"] == "127.0.0.1"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert users_environment({"DMLC_NODE_HOST": "127.0.0.2"})["DMLC_NODE_HOST"] == "127.0.0.2"


def test_a_virtual_environment_that_is_not_activated_is_for_the_nodes_too(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/opt/venv")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert users_environment({})["PATH"] == "/opt/venv/bin:/usr/bin"
    monkeypatch.setenv("VIRTUAL_ENV", "/home/alice/another")
    assert users_environment({})["PATH"] == "/usr/bin"


def test_the_scheduler_chooses_its_port_and_writes_it_to_the_ready_file():
    scheduler = local(ready_file=Path("/tmp/x")).scheduler
    assert scheduler.member == SCHEDULER
    assert json.loads(scheduler.start_message)["command"][1:] == [
        "-m",
        "netstorm",
        "scheduler",
        "--port",
        "0",
        "--ready-file",
        "/tmp/x",
        "--launched",
    ]
    assert scheduler.environment["DMLC_ROLE"] == "scheduler"
    assert scheduler.environment["DMLC_NUM_WORKER"] == "2"
    assert "NETSTORM_RANK" not in scheduler.environment


def test_a_value_that_nodes_would_refuse_is_refused_before_anything_starts():
    with pytest.raises(SettingsError, match="NETSTORM_SITE='a b'"):
        local(sites=["a b", "c"])


def test_a_command_is_looked_for_before_anything_starts(tmp_path):
    (tmp_path / "train.py").write_text("")
    for name, code, hint in [
        ("no-such-command", 127, "not found in PATH="),
        ("train.py", 127, "to run the script of that name here: -- python train.py"),
        ("./train.py", 126, "not executable; to run a Python script: -- python ./train.py"),
        ("./nowhere.py", 127, f"'./nowhere.py' not found in {tmp_path}"),
        (str(tmp_path), 126, "is a folder"),
        ("-n", 127, "options of the launcher come before --"),
    ]:
        with pytest.raises(CommandError) as caught:
            find_command([name], tmp_path, {"PATH": "/usr/bin:/bin"})
        assert caught.value.exit_code == code
        assert hint in str(caught.value)
    with pytest.raises(UsageError, match="no command"):
        find_command([], tmp_path, {})
    find_command(["sh"], tmp_path, {"PATH": "/usr/bin:/bin"})


# --------------------------------------------------------------------------------------------------- over ssh


def test_over_ssh_nothing_but_the_interpreters_name_passes_through_a_shell():
    node = over_ssh().nodes(None)[1]
    *ssh, host, words = node.supervisor
    assert ssh[0] == "ssh"
    assert host == "alice@paris"
    assert shlex.split(words) == ["/opt/my python/bin/python", "-m", "netstorm.cli.launch.remote"]
    message = json.loads(node.start_message)
    assert message["command"] == ["python", "train.py", "a b", "$HOME", "it's"]
    assert message["folder"] == "/data/my runs"
    assert message["variables"] == {
        "LR": "0.1 $x",
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "tokyo",
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_NUM_WORKER": "2",
        "NETSTORM_RANK": "1",
        "NETSTORM_SITE": "west",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "tokyo",
        "MASTER_PORT": "10091",
    }


def test_the_scheduler_runs_on_the_first_host_of_the_file_whatever_its_rank():
    job = over_ssh("paris rank=1\ntokyo rank=0")
    assert job.hosts == {SCHEDULER: "paris", Member(0): "tokyo", Member(1): "paris"}
    assert job.scheduler is not None
    assert json.loads(job.scheduler.start_message)["command"][1:] == [
        "-m",
        "netstorm",
        "scheduler",
        "--launched",
    ]
    assert [node.member for node in job.nodes(None)] == [0, 1]
    assert json.loads(job.nodes(None)[0].start_message)["variables"]["DMLC_PS_ROOT_URI"] == "paris"


def test_the_scheduler_can_run_on_a_host_of_its_own_and_its_user_is_no_part_of_its_address():
    job = over_ssh(scheduler_host="bob@hub")
    assert job.hosts[SCHEDULER] == "bob@hub"
    assert json.loads(job.nodes(None)[0].start_message)["variables"]["DMLC_PS_ROOT_URI"] == "hub"


def test_the_address_of_a_line_is_what_its_node_advertises():
    first, second = over_ssh("tokyo address=203.0.113.7\nparis").nodes(None)
    assert json.loads(first.start_message)["variables"]["DMLC_NODE_HOST"] == "203.0.113.7"
    assert "DMLC_NODE_HOST" not in json.loads(second.start_message)["variables"]


def test_a_scheduler_on_localhost_is_refused_if_nodes_are_elsewhere():
    with pytest.raises(UsageError, match="'localhost' is another machine for 'paris'"):
        over_ssh("localhost\nparis")
    assert over_ssh("localhost slots=2").size == 2


def test_pytorch_meets_at_the_host_of_rank_0_wherever_the_scheduler_is():
    job = over_ssh("bob@tokyo rank=1\nparis rank=0 address=203.0.113.7\ntokyo rank=2", port=65_000)
    own = [json.loads(node.start_message)["variables"] for node in job.nodes(None)]
    assert {one["DMLC_PS_ROOT_URI"] for one in own} == {"tokyo"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in own} == {("203.0.113.7", "64000")}
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in own] == [
        ("0", "1"),
        ("0", "2"),
        ("1", "2"),
    ]


def test_a_rank_0_on_localhost_has_no_address_that_other_hosts_could_use():
    job = over_ssh("localhost\nparis", scheduler_host="paris")
    assert all("MASTER_ADDR" not in json.loads(node.start_message)["variables"] for node in job.nodes(None))
    given = over_ssh("localhost\nparis", scheduler_host="paris", variables={"MASTER_ADDR": "10.0.0.1"})
    assert json.loads(given.nodes(None)[1].start_message)["variables"]["MASTER_ADDR"] == "10.0.0.1"


def test_settings_that_are_set_here_are_passed_on_but_not_those_of_this_machine():
    here = {
        "CHUNK_SIZE": "1024",
        "DMLC_NODE_HOST": "10.0.0.1",
        "NETSTORM_RANK": "3",
        "MASTER_ADDR": "10.0.0.2",
        "HOME": "/root",
        "UPDATE_TIME": "",
    }
    assert passed_on(here, {"LR": "1"}) == {"CHUNK_SIZE": "1024", "LR": "1"}


def test_over_there_the_interpreters_folder_comes_first_and_the_cores_are_shared_out(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = environment_here({"LR": "0.1"}, 10_000)
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["LR"] == "0.1"
    assert environment_here({"PATH": "/mine"}, 1)["PATH"] == "/mine"


# -------------------------------------------------------------------------------------------------- restarts
# What is started again, how often and when.


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
