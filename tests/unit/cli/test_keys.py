from __future__ import annotations

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from netstorm.pslite.admission import parse_allow_list
from netstorm.pslite.keys import JobKey, NodeKey, SchedulerKey, key_text


def run(*arguments):
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


def test_a_new_job_key_is_in_its_file_and_in_no_output(tmp_path):
    result = run("new", tmp_path / "job.key")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "set NETSTORM_KEY_FILE" in result.stderr
    key = JobKey.load(tmp_path / "job.key")
    assert key.file_text() == (tmp_path / "job.key").read_text()
    assert key.file_text().split('"')[-2] not in result.output


def test_a_second_key_of_the_same_file_is_refused(tmp_path):
    run("new", tmp_path / "job.key")
    result = run("new", tmp_path / "job.key")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"netstorm: {tmp_path}/job.key: there is such a file")


def test_a_new_nodes_key_prints_the_line_of_the_list(tmp_path):
    result = run("new", "--node", "tokyo", tmp_path / "tokyo.key")
    assert result.exit_code == 0
    key = NodeKey.load(tmp_path / "tokyo.key")
    assert parse_allow_list(result.stdout, "stdout") == {key.keys.public: "tokyo"}
    assert run("show", tmp_path / "tokyo.key").stdout == result.stdout
    assert run("show", tmp_path / "nothing").exit_code == 2


def test_a_new_key_of_schedulers_is_in_its_file_and_in_no_output(tmp_path):
    result = run("new", "--scheduler", tmp_path / "scheduler.key")
    assert result.exit_code == 0
    assert "set NETSTORM_SCHEDULER_KEY" in result.stderr
    assert key_text(SchedulerKey.load(tmp_path / "scheduler.key").secret) not in result.output
    both = run("new", "--scheduler", "--node", "tokyo", tmp_path / "other.key")
    assert both.exit_code == 2
    assert "--scheduler with --node tokyo: expected one of them" in both.stderr


@pytest.mark.parametrize("group", ["keys", "checkpoint", "wan"])
def test_a_group_of_subcommands_without_one_says_what_is_missing(group):
    done = CliRunner().invoke(app, [group])
    assert done.exit_code == 2
    assert "Missing command" in done.output
