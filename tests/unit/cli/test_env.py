from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm import __version__
from netstorm.cli.env import markdown_page
from netstorm.cli.main import COMMANDS, app
from netstorm.settings import declarations

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": "80", **environment}, prog_name="netstorm"
    )


def test_the_page_of_settings_does_not_depend_on_the_environment():
    assert run("env", "--markdown", CHUNK_SIZE="9").stdout == markdown_page()


def test_every_setting_is_printed_within_80_columns():
    result = run("env", NETSTORM_SITE="seattle")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    for declaration in declarations().values():
        assert sum(line.startswith(f"{declaration.variable} ") for line in lines) == 1
    (site,) = [line.split() for line in lines if line.startswith("NETSTORM_SITE ")]
    assert site == ["NETSTORM_SITE", "seattle", "environment", "(empty)"]


def test_settings_are_found_by_a_part_of_their_name():
    rows = json.loads(run("env", "--json", "chunk", "NETSTORM_SITE").stdout)["settings"]
    found = {row["variable"] for row in rows}
    assert {"CHUNK_SIZE", "PROBE_CHUNK_SIZE", "NETSTORM_SITE"} <= found
    assert all("CHUNK" in name or "SITE" in name for name in found)


def test_a_name_that_no_setting_has_is_refused():
    result = run("env", "chunk", "chnk")
    assert result.exit_code == 2
    assert "chnk: no setting has that in its name" in result.output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf_8_gets_what_it_can_show(encoding):
    command = [sys.executable, "-m", "netstorm", "plan", str(ROOT / "examples/networks/four_sites.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"3?2" in done.stdout


def test_json_has_everything_that_the_table_has():
    result = run("env", "--json", CHUNK_SIZE="9", NETSTORM_RNK="1")
    printed = json.loads(result.stdout)
    rows = {row["variable"]: row for row in printed["settings"]}
    assert list(rows) == [declaration.variable for declaration in declarations().values()]
    chunk = rows["CHUNK_SIZE"]
    assert (chunk["name"], chunk["value"], chunk["source"], chunk["default"], chunk["unit"]) == (
        *("chunk_size", 9, "environment", 32_768, "elements"),
    )
    assert chunk["meaning"].startswith("largest chunk")
    assert "did you mean NETSTORM_RANK?" in printed["notes"][0]


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_wrong_setting_is_one_line_and_exit_code_2(option):
    result = run("env", *option, DMLC_PS_ROOT_PORT="abc")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "netstorm: DMLC_PS_ROOT_PORT='abc': expected a whole number from 1 to 65535"
    )


def test_a_variable_that_is_not_known_is_noted_beside_the_table():
    result = run("env", NETSTORM_RNK="1", DMLC_NUM_SERVER="2")
    assert result.exit_code == 0
    assert "did you mean NETSTORM_RANK?" in result.stderr
    assert "DMLC_NUM_SERVER=2 is ignored" in result.stderr


def test_help_lists_every_subcommand():
    result = run("--help")
    assert result.exit_code == 0
    for name, line in COMMANDS.items():
        assert name in result.stdout
        assert line[:40] in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_has_help_of_its_own(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Usage: netstorm {name}" in result.stdout


def test_an_unknown_subcommand_is_exit_code_2():
    result = run("nonsuch")
    assert result.exit_code == 2
    assert "nonsuch" in result.stderr
    assert "Did you mean 'launch'" in run("lanch").stderr


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"netstorm {__version__}\n"
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_python_m_netstorm_is_the_command_and_help_imports_nothing_heavy():
    heavy = "{'zmq', 'numpy', 'networkx', 'mxnet', 'torch'}"
    program = (
        f"import sys, runpy, atexit; atexit.register(lambda: print('heavy:', {heavy} & set(sys.modules)))\n"
    )
    program += "sys.argv = ['netstorm', '--help']; runpy.run_module('netstorm', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "Usage: netstorm [OPTIONS] COMMAND" in result.stdout
    assert "heavy: set()" in result.stdout
