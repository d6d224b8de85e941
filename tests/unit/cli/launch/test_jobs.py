from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from netstorm.cli.launch.hosts import passed_on, place, ssh_job
from netstorm.cli.launch.job import CommandError, find_command
from netstorm.cli.launch.local_job import local_job, users_environment
from netstorm.cli.launch.remote import environment_here
from netstorm.cli.launch.shutdown import SCHEDULER, Member
from netstorm.cli.launch.variables import threads_each
from netstorm.errors import SettingsError, UsageError


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
        "ssh": ["ssh"],
        "with_scheduler": True,
    }
    return ssh_job(**{**options, **changes})


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
