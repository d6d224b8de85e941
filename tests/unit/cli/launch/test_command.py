"""What is refused before anything is started; what is accepted is tested with real processes elsewhere."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app


def launch(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["launch", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "true"], "how many nodes? As in: netstorm launch -n 4 -- python train.py"),
        (["-n", "0", "--", "true"], "-n 0: expected at least 1 node"),
        (["-n", "-3", "--", "true"], "-n -3: expected at least 1 node"),
        (["-n", "2"], "no command: write it last, after --"),
        (["-n", "2", "--"], "no command: write it last, after --"),
        (["-n", "2", "--site", "a", "--site", "b,c", "--", "true"], "--site: 3 names for 2 nodes"),
        (
            ["-n", "2", "--site", "a,", "--topology", "donut", "--", "true"],
            "NETSTORM_TOPOLOGY='donut': expected one of",
        ),
        (["-n", "2", "--network", "nowhere.yaml", "--", "true"], "--network nowhere.yaml: no such file"),
        (["-n", "2", "--chdir", "/nowhere", "--", "true"], "--chdir /nowhere: no such folder"),
        (["-n", "2", "--env", "=1", "--", "true"], "--env '=1': expected NAME=VALUE"),
        (
            ["-n", "2", "--env", "NOT_SET_ANYWHERE", "--", "true"],
            "--env 'NOT_SET_ANYWHERE': expected NAME=VALUE",
        ),
        (
            ["-n", "2", "--env", "NETSTORM_RANK=1", "--", "true"],
            "NETSTORM_RANK is set by the launcher itself",
        ),
        (["-n", "2", "--env", "RANK=1", "--", "true"], "RANK is set by the launcher itself"),
        (["-n", "2", "--env", "MASTER_PORT=0", "--", "true"], "MASTER_PORT=0: expected a TCP port"),
        (
            ["-n", "2", "--env", "CHUNK_SIZE=0", "--", "true"],
            "CHUNK_SIZE='0': expected a whole number, at least 1",
        ),
        (
            ["-n", "2", "--env", "NETSTORM_CHUNK=1", "--", "true"],
            "NETSTORM_CHUNK: there is no setting of that name",
        ),
        (["-n", "2", "--env", "NETSTORM_HUB=2", "--", "true"], "NETSTORM_HUB=2: expected a rank from 0 to 1"),
        (["-n", "2", "--scheduler", "tokyo", "--", "true"], "--scheduler is for --hosts"),
        (["-n", "2", "--ssh", "ssh", "--", "true"], "--ssh is for --hosts"),
        (["--slurm", "--ssh", "ssh", "--", "true"], "--ssh is for --hosts: with --slurm srun"),
        (["--slurm", "--hosts", "nowhere", "--", "true"], "it goes with neither --hosts nor --wan"),
        (
            ["-n", "2", "--log-dir", "/dev/null/x", "--", "true"],
            "--log-dir /dev/null/x: cannot be made",
        ),
        (["--hosts", "nowhere", "--", "true"], "nowhere: cannot read the host file"),
        (
            ["--hosts", "nowhere", "--port", "0", "--", "true"],
            "--port 0: nodes on other hosts must know the port",
        ),
        (["-n", "2", "--join", "tokyo", "--", "true"], "--join 'tokyo': expected HOST:PORT"),
        (
            ["-n", "2", "--join", "tokyo:9091", "--port", "9092", "--", "true"],
            "--port does not go with --join",
        ),
        (
            ["-n", "2", "--join", "tokyo:9091", "--job", "a/b", "--", "true"],
            "NETSTORM_JOB='a/b'",
        ),
        (
            ["--hosts", "nowhere", "--site", "a", "--", "true"],
            "--site: with --hosts sites are written in the host",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_exit_code_2_and_what_is_allowed(words, message):
    code, output = launch(*words)
    assert message in output
    assert code == 2


@pytest.mark.parametrize("word", ["--no-such-option", "--port=70000", "--grace=-1"])
def test_options_that_typer_checks_give_exit_code_2_too(word):
    code, output = launch("-n", "2", word, "--", "true")
    assert code == 2
    assert word.partition("=")[0] in output


def test_a_number_of_nodes_that_contradicts_the_host_file_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("tokyo slots=3")
    code, output = launch("-n", "2", "--hosts", str(tmp_path / "hosts"), "--", "true")
    assert code == 2
    assert "has 3 nodes; leave -n out" in output


def test_a_command_that_does_not_exist_gives_exit_code_127():
    code, output = launch("-n", "2", "--", "no-such-command")
    assert code == 127
    assert "command 'no-such-command' not found" in output


def test_the_help_shows_examples_on_lines_of_their_own():
    code, output = launch("--help")
    assert code == 0
    assert "\n    netstorm launch -n 4 -- python train.py --epochs 3\n" in output
    assert "--no-scheduler" not in output
