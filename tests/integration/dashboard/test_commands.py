"""`netstorm dashboard`, `record` and `report` beside a real job, and the dashboard that a launcher starts."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from tests.integration.dashboard.chromium import LIMIT_S, dashboard, first_update, wait_for
from tests.integration.jobs import Job, run_netstorm

pytestmark = pytest.mark.skipif(find_spec("uvicorn") is None, reason="the extra dashboard is not installed")

NODE = """
import pathlib, sys, time
import numpy as np
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.kvstore.operations import Operation

runtime = runtime_of_this_process()
key = runtime.register(0, "w", (1000,), "float32")
values = np.ones(1000, np.float32)
runtime.allreduce(Operation(key=key, round=0, source=values.copy(), destination=values, done=lambda _: None))
print("a round", flush=True)
while not pathlib.Path(sys.argv[0]).with_name("stop").exists():
    time.sleep(0.02)
"""
FAST = {"PS_HEARTBEAT_INTERVAL": "0.1"}


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def test_a_running_job_is_shown_recorded_and_reported(tmp_path):
    token = tmp_path / "web.token"
    token.touch(0o600)
    token.write_text("0123456789abcdef0123456789abcdef")
    with Job(tmp_path, 2, NETSTORM_WEB_TOKEN_FILE=token, **FAST) as job:
        for rank in range(2):
            job.start(rank, NODE, NETSTORM_SITE=f"site{rank}")
        for rank in range(2):
            job.wait_until_said(rank, "a round")
        options = ("--scheduler", job.address, "--token-file", str(token))

        with dashboard(tmp_path, *options) as address:
            page, _ = address.split("?")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(page)  # the scheduler has a token, so the page has one, too
            update = first_update(address)
            assert [node["site"] for node in update["frame"]["nodes"]] == ["site0", "site1"]
            (key,) = update["frame"]["keys"]["first"]
            assert (key["name"], key["shape"], key["dtype"], key["bytes"]) == ("w", [1000], "float32", 4000)
            assert all(node["queued"] >= 0 for node in update["frame"]["nodes"] if "queued" in node)

        top = shlex.join([sys.executable, "-m", "netstorm", "top", "--json", *options])
        with dashboard(tmp_path, "--through", top) as address:
            assert first_update(address)["frame"]["workers"] == 2

        file = tmp_path / "job.jsonl"
        recorder = subprocess.Popen(
            [sys.executable, "-m", "netstorm", "record", str(file), "--every", "0.1s", *options]
        )
        try:
            wait_for(lambda: file.exists() and file.read_text().count("\n") >= 3, "three statuses")
            recorder.send_signal(signal.SIGINT)
            assert recorder.wait(LIMIT_S) == 0
        finally:
            recorder.kill()
            recorder.wait()
        made = run_netstorm(tmp_path, "report", str(file), "-o", str(tmp_path / "job.html"))
        assert (made.code, "site1" in (tmp_path / "job.html").read_text()) == (0, True)

        (tmp_path / "stop").touch()
        assert [end.code for end in job.end_all()] == [0, 0]


def test_strangers_that_say_nothing_or_have_no_token_keep_no_viewer_out(tmp_path):
    token = tmp_path / "web.token"
    token.touch(0o600)
    token.write_text("0123456789abcdef0123456789abcdef")
    with (
        Job(tmp_path, 1, NETSTORM_WEB_TOKEN_FILE=token) as job,
        dashboard(tmp_path, "--scheduler", job.address, "--token-file", str(token)) as address,
        ExitStack() as strangers,
    ):
        where = urlsplit(address)
        assert where.hostname is not None
        assert where.port is not None
        open_ones = []
        for number in range(200):
            stranger = socket.create_connection((where.hostname, where.port), LIMIT_S)
            open_ones.append(strangers.enter_context(stranger))
            if number % 4 == 0:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 401 " in stranger.recv(4096)
        assert "<title>NetStorm</title>" in browser().open(address, timeout=LIMIT_S).read().decode()
        assert open_ones[-1].recv(1) == b"", "the last one is closed, too"


def browser() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPCookieProcessor())


def test_a_launcher_starts_a_dashboard_that_ends_with_the_job(tmp_path):
    script = tmp_path / "node.py"
    script.write_text(NODE)
    words = [
        sys.executable,
        "-m",
        "netstorm",
        "launch",
        "--dashboard",
        "-n",
        "2",
        "--",
        sys.executable,
        script,
    ]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        found = wait_for(
            lambda: re.search(r"\[dashboard\] netstorm dashboard: (\S+)", (tmp_path / "said").read_text()),
            "the dashboard's address",
        )
        assert first_update(found[1])["frame"]["workers"] == 2
        wait_for(lambda: (tmp_path / "said").read_text().count("a round") == 2, "the round")
        launcher.send_signal(signal.SIGINT)
        launcher.wait(LIMIT_S)
        with pytest.raises(urllib.error.URLError, match="refused"):
            get(found[1])
    finally:
        launcher.kill()
        launcher.wait()


def test_without_a_terminal_there_is_none_unless_it_is_asked_for(tmp_path):
    ended = run_netstorm(tmp_path, "launch", "-n", "1", "--", sys.executable, "-c", "print('trained')")
    assert "trained" in ended.text
    assert "dashboard" not in ended.text
    elsewhere = ("--dashboard", "-n", "1", "--join", "127.0.0.1:1", "--job", "a")
    refused = run_netstorm(tmp_path, "launch", *elsewhere, "--", "true")
    assert refused.code == 2
    assert "--dashboard does not go with --join" in refused.err


@pytest.mark.parametrize(
    ("variables", "jump"),
    [({"SSH_CONNECTION": "203.0.113.1 1 203.0.113.2 22"}, ""), ({"SLURM_SUBMIT_HOST": "login"}, " -J login")],
)
def test_who_is_at_another_machine_is_told_how_ssh_reaches_the_page(tmp_path, monkeypatch, variables, jump):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    top = shlex.join([sys.executable, "-c", "import time; time.sleep(600)"])
    with dashboard(tmp_path, "--through", top) as address:
        port = re.findall(r":(\d+)/", address)[0]
        way = f"ssh -N -L {port}:127.0.0.1:{port}{jump} {os.uname().nodename}"
        wait_for(lambda: way in (tmp_path / "dashboard.out").read_text(), way)


def test_ctrl_c_before_the_page_is_served_is_an_orderly_end_too(monkeypatch):
    def serve(listener, *_, **__):
        listener.close()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("netstorm.dashboard.server.serve", serve)
    monkeypatch.setattr("netstorm.cli.dashboard._replay", lambda _: None)
    ended = CliRunner().invoke(app, ["dashboard", "--port", "0", "--file", "a recording"])
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("netstorm dashboard: http://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("dashboard", "--file", "none.jsonl"), "none.jsonl: the recording cannot be read"),
        (("dashboard", "--file", "a", "--scheduler", "b:1"), "expected one of them"),
        (("dashboard", "--through", "no-such-program"), "'no-such-program': No such file"),
        (("dashboard", "--through", ""), "--through '': expected a command"),
        (("dashboard", "--through", "ssh 'host"), "No closing quotation"),
        (("record", "a.jsonl", "--every", "1ms"), "--every 1ms: expected at least 0.1s"),
        (("record", "a.jsonl", "--limit", "1kB"), "--limit 1kB: expected at least 100kB"),
        (("report", "none.jsonl", "-o", "a.html"), "none.jsonl: the recording cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path, words, text):
    ended = run_netstorm(tmp_path, *words)
    assert ended.code == 2
    assert text in ended.err
