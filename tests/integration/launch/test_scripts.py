"""scripts/run_node.sh and scripts/run_scheduler.sh; scripts/launch_ssh.sh is among the tests of ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.forking import ROOT
from tests.integration.launch.launcher import PATIENCE_S, PREAMBLE

NODE = str(ROOT / "scripts" / "run_node.sh")
SCHEDULER = str(ROOT / "scripts" / "run_scheduler.sh")
JOB = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_WORKER": "2"}


def run(
    script: str, *words: str, folder: Path = ROOT, variables: Mapping[str, str] = JOB
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script, *words],
        check=False,
        cwd=folder,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}


def test_a_node_runs_its_command_as_a_worker_in_the_callers_folder(tmp_path):
    show = 'echo "$DMLC_ROLE $NETSTORM_RANK $PWD $1"; exit 5'
    ended = run(
        NODE, "sh", "-c", show, "sh", "a  b", folder=tmp_path, variables={**JOB, "NETSTORM_RANK": "1"}
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, f"worker 1 {tmp_path} a  b\n", "")


def test_a_node_with_a_rank_has_what_pytorch_reads():
    show = 'echo "$RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT"'
    own = {**JOB, "NETSTORM_RANK": "1", "RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""}
    assert run(NODE, "sh", "-c", show, variables=own).stdout == "1 2 127.0.0.1 10091\n"
    given = {**own, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7", "DMLC_PS_ROOT_PORT": "9000"}
    assert run(NODE, "sh", "-c", show, variables=given).stdout == "1 2 10.0.0.1 7\n"


def test_a_rank_that_pytorchs_launcher_has_given_is_netstorms_too():
    own = {**JOB, "NETSTORM_RANK": "", "RANK": "1"}
    show = 'echo "$NETSTORM_RANK $RANK"'
    assert run(NODE, "sh", "-c", show, variables={**own, "WORLD_SIZE": "2"}).stdout == "1 1\n"
    assert run(NODE, "sh", "-c", show, variables={**own, "WORLD_SIZE": "3"}).stdout == " 1\n"


def test_signals_reach_the_nodes_command_itself(tmp_path):
    (tmp_path / "program.py").write_text(PREAMBLE + "note(os.getpid(), 'up')\ntime.sleep(600)")
    node = subprocess.Popen(
        [NODE, "--", sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment(JOB),
        stdout=subprocess.PIPE,
    )
    try:
        while not (tmp_path / "up").exists():
            assert node.poll() is None
        assert (tmp_path / "up").read_text() == str(node.pid)
        node.send_signal(signal.SIGTERM)
        assert node.wait(PATIENCE_S) == -signal.SIGTERM
    finally:
        node.kill()
        node.communicate()


@pytest.mark.parametrize("script", [NODE, SCHEDULER])
def test_a_variable_that_must_be_set_is_named(script):
    for missing in JOB:
        ended = run(script, *["true"] * (script == NODE), variables={**JOB, missing: ""})
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"netstorm: {missing} is not set: ")


def test_what_is_wrong_is_said_before_the_nodes_command_starts():
    for words, variables, code, message in (
        ([], {}, 2, "netstorm: no command: scripts/run_node.sh python train.py"),
        (["no-such-command"], {}, 127, "netstorm: command no-such-command not found"),
        (["true"], {"DMLC_ROLE": "boss"}, 2, "netstorm: DMLC_ROLE='boss': expected worker, scheduler or"),
        (["true"], {"NETSTORM_RANK": "2"}, 2, "netstorm: NETSTORM_RANK=2: expected a rank from 0 to 1"),
    ):
        ended = run(NODE, *words, variables={**JOB, **variables})
        assert ended.returncode == code
        assert ended.stderr.startswith(message)


def test_a_server_of_an_old_launcher_has_nothing_to_do():
    ended = run(NODE, "false", variables={**JOB, "DMLC_ROLE": "server"})
    assert ended.returncode == 0
    assert "DMLC_ROLE=server has nothing to do" in ended.stdout
