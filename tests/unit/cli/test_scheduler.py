"""Options of `netstorm scheduler` that contradict each other are errors before anything listens."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--recover", "--recover without --peers"),
        ("--peers a:1", "--peers a:1 without --recover"),
        ("--recover --peers a:1 --state x", "NETSTORM_STATE_DIR (--state): expected one of them"),
        ("--recover --peers a:1 --standby", "NETSTORM_STANDBY=1 (--standby): expected one of them"),
        ("--recover --peers a:1 --jobs 2", "expected one, since it takes over one"),
        ("--recover --peers 10.0.0.1:1", "nodes at 10.0.0.1:1 cannot reach this scheduler there"),
        ("--recover --peers a", "addresses such as"),
    ],
)
def test_what_a_recovering_scheduler_cannot_be(options, expected):
    found = CliRunner().invoke(app, ["scheduler", *options.split()])
    assert found.exit_code == 2
    assert expected in found.output
