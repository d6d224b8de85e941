from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.forking import ROOT
from tests.integration.launch.launcher import ended, inside, until

FAKE_SSH = f"{sys.executable} {Path(__file__).with_name('fake_ssh.py')}"
NASTY = "a b 'c' \"d\" $HOME `id` \\ \t * ~ ! é\n;true"

SAY_ALL = """
import json
wanted = ("NETSTORM_", "DMLC_", "CHUNK_", "NASTY", "SSH_CONNECTION")
variables = {name: value for name, value in os.environ.items() if name.startswith(wanted)}
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd(), "variables": variables}))
"""


@pytest.fixture
def over_ssh(launcher, monkeypatch):
    """Return a function that makes the launcher go through the fake ssh to some hosts."""

    def use(hosts: str, *arguments: str, script: bool = False) -> None:
        (launcher.folder / "hosts").write_text(hosts)
        command = [sys.executable, "-u", str(launcher.program), *arguments]
        first = ["netstorm", "launch", "--hosts", "hosts"]
        if script:
            first = [str(ROOT / "scripts" / "launch_ssh.sh"), "hosts"]
        launcher.words = lambda *options: [
            *first,
            *("--no-scheduler", "--ssh", FAKE_SSH, "--python", sys.executable),
            *options,
            "--",
            *command,
        ]

    return use


def test_variables_arguments_and_folder_arrive_as_they_were(launcher, over_ssh):
    over_ssh("tokyo site=east\nalice@paris address=203.0.113.7\n", NASTY, "", "$1")
    ended = launcher.run(SAY_ALL, "--env", f"NASTY={NASTY}", CHUNK_SIZE="4096", NETSTORM_RANK="7")
    assert (ended.code, ended.err) == (0, "")
    first, second = (json.loads(line[4:]) for line in sorted(ended.out.splitlines()))
    assert first["arguments"] == second["arguments"] == [NASTY, "", "$1"]
    assert first["folder"] == second["folder"] == str(launcher.folder)
    common = {
        "NASTY": NASTY,
        "CHUNK_SIZE": "4096",
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "tokyo",
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_NUM_WORKER": "2",
        "NETSTORM_RESTART": "0",
    }
    assert first["variables"] == common | {
        "NETSTORM_RANK": "0",
        "NETSTORM_SITE": "east",
        "SSH_CONNECTION": "tokyo",
    }
    assert second["variables"] == common | {
        "NETSTORM_RANK": "1",
        "DMLC_NODE_HOST": "203.0.113.7",
        "SSH_CONNECTION": "alice@paris",
    }


def test_a_port_for_pytorch_that_is_taken_is_named(launcher, over_ssh):
    over_ssh("localhost slots=2")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        ended = launcher.run("print(os.environ['MASTER_PORT'])", "--env", f"MASTER_PORT={port}")
    assert sorted(ended.out.splitlines()) == [f"[0] {port}", f"[1] {port}"]
    assert ended.err.count(f"TCP port {port} is taken on the host of rank 0") == 1


def test_a_host_that_cannot_be_reached_is_told_from_a_command_that_fails(launcher, over_ssh):
    over_ssh("tokyo\nunreachable")
    ended = launcher.run("time.sleep(0 if rank else 600)", "--grace", "0.2")
    assert ended.code == 255
    assert "[1] ssh: connect to host unreachable port 22: No route to host" in ended.err
    assert "rank 1 on unreachable failed with exit code 255 (ssh's own code" in ended.err


def test_an_interpreter_or_folder_that_a_host_does_not_have_is_named(launcher, over_ssh):
    over_ssh("tokyo")
    ended = launcher.run("", "--python", "/no/such/python")
    assert ended.code == 127
    assert "/no/such/python" in ended.err
    ended = launcher.run("", "--chdir", "/no/such/folder")
    assert ended.code == 126
    assert "in the folder '/no/such/folder': No such file or directory" in ended.err


def test_ctrl_c_to_the_script_stops_all_remote_processes(launcher, over_ssh):
    over_ssh("tokyo\nparis slots=2", script=True)
    program = "child = subprocess.Popen(['sleep', '600'])\nnote(child.pid)\ntime.sleep(600)"
    with launcher.started(program) as process:
        launcher.wait_for_pids(6)
        process.send_signal(signal.SIGINT)
        end = ended(process)
    assert end.code == 130
    assert not inside(launcher.folder)


def test_remote_processes_do_not_outlive_a_launcher_that_was_killed(launcher, over_ssh):
    over_ssh("tokyo\nparis")
    with launcher.started("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)") as process:
        launcher.wait_for_pids(2)
        process.kill()
        until(lambda: not inside(launcher.folder), "the remote processes to end")


def test_a_connection_that_is_lost_ends_the_remote_process(launcher, over_ssh):
    over_ssh("tokyo\nparis")
    program = "note(os.getpid(), f'rank-{rank}')\ntime.sleep(600)"
    with launcher.started(program, "--grace", "0.2") as process:
        until(lambda: len([*launcher.folder.glob("rank-*")]) == 2, "both nodes")
        (client,) = (each for each in psutil.Process(process.pid).children() if "paris" in each.cmdline())
        client.kill()
        end = ended(process)
        until(lambda: not inside(launcher.folder), "the remote processes to end")
    assert "[launch] rank 1 on paris was killed by SIGKILL" in end.err
