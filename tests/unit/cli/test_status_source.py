"""Commands that watch a job, without one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app


@pytest.mark.parametrize("words", [("top",), ("record", "job.jsonl"), ("dashboard",)])
def test_who_watches_need_not_say_how_many_nodes_an_elastic_job_begins_with(words, monkeypatch):
    monkeypatch.setenv("NETSTORM_ELASTIC", "2:4")
    done = CliRunner().invoke(app, [*words, "--scheduler", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "--scheduler 127.0.0.1:1: no scheduler there shows a job" in done.output
