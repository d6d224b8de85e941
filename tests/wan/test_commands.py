from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from tests.integration.dashboard.chromium import first_update
from tests.wan.test_two_hosts import PLAIN_SUM
from tests.wan.traces import LINE, NETSTORM, ROOT, netstorm, nothing_left_since, traces

SHOW = """
import os
names = ["NETSTORM_RANK", "DMLC_NODE_HOST", "DMLC_PS_ROOT_URI", "NETSTORM_SITE", "NETSTORM_NETWORK"]
print(*(os.environ.get(name, "-") for name in names))
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "line.yaml"
    path.write_text(LINE)
    return str(path)


def test_up_exec_set_status_and_down(file):
    before, name = traces(), f"c{os.getpid()}"  # names are the machine's
    up = netstorm("wan", "up", file, "--name", name)
    try:
        assert up.returncode == 0, up.stderr
        assert f"{name} is up: 3 nodes, 4 links; backend: " in up.stdout
        code = netstorm("wan", "exec", "--name", name, "1", "--", "sh", "-c", "ip -o -4 addr; exit 7")
        assert code.returncode == 7
        assert "10.78.0.2/32" in code.stdout
        changed = netstorm("wan", "set", "--name", name, "--between", "0", "1", "--rate", "33Mbit")
        assert changed.returncode == 0, changed.stderr
        facts = json.loads(netstorm("wan", "status", "--name", name, "--json").stdout)
        rates = {(link["source"], link["target"]): link["rate"] for link in facts["links"]}
        assert rates == {(0, 1): 33e6, (1, 0): 33e6, (1, 2): 40e6, (2, 1): 40e6}
        assert facts["congestion"] == "bbr"
        assert "33Mbit/s" in netstorm("wan", "status", "--name", name).stdout
    finally:
        down = netstorm("wan", "down", "--name", name)
    assert down.stdout == f"{name} is down\n"
    assert nothing_left_since(before)


def test_what_cannot_be_done_is_refused_before_anything_is_made(file, tmp_path):
    (tmp_path / "wrong.yaml").write_text("nodes: {0: {}}\nlinks: 3\n")
    launch = ("launch", "--wan", file)
    for words, message in (
        (("wan", "status", "--name", "nothing"), "no emulated network 'nothing' is up"),
        (("wan", "up", str(tmp_path / "wrong.yaml")), "wrong.yaml:2:"),
        ((*launch, "-n", "4", "--", "true"), "has 3 nodes; leave -n out"),
        ((*launch, "--scheduler", "tokyo", "--", "true"), "with --wan expected a rank, 0 to 2"),
        ((*launch, "--hosts", os.devnull, "--", "true"), "it does not go with --hosts"),
        ((*launch, "--join", "127.0.0.1:9091", "--ipv6", "--", "true"), "--wan does not go with --join"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, words
        assert message in done.stderr


def test_a_job_runs_with_every_rank_in_its_namespace_and_the_scheduler_where_asked_for(file, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    done = netstorm(
        "launch", "--wan", file, "--scheduler", "2", "--grace", "1", "--", "python", str(tmp_path / "show.py")
    )
    lines = sorted(line for line in done.stdout.splitlines() if not line.startswith("[scheduler]"))
    assert lines == [
        "[0] 0 10.78.0.1 10.78.0.3 a -",
        "[1] 1 10.78.0.2 10.78.0.3 b -",
        "[2] 2 10.78.0.3 10.78.0.3 - -",
    ], done.stdout + done.stderr
    assert "congestion control: bbr" in done.stderr


def test_a_job_may_use_the_addresses_of_ipv6(file, tmp_path):
    (tmp_path / "sum.py").write_text(PLAIN_SUM)
    done = netstorm("launch", "--wan", file, "--ipv6", "--", "python", str(tmp_path / "sum.py"), timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"[{rank}] sum 3.0 fd4e:5354::{rank + 1}" in done.stdout


@pytest.mark.slow
def test_a_job_that_is_told_nothing_finds_out_which_pairs_have_a_line(tmp_path):
    links = "".join(f"  - {{between: [{one}, {one + 1}], rate: 40Mbit, latency: 10ms}}\n" for one in range(4))
    (tmp_path / "chain.yaml").write_text("nodes: {0: {}, 1: {}, 2: {}, 3: {}, 4: {}}\nlinks:\n" + links)
    node = ("python", str(ROOT / "benchmarks" / "workers" / "estimates.py"), str(tmp_path), "8", "4")
    done = netstorm("launch", "--wan", str(tmp_path / "chain.yaml"), "--grace", "5", "--", *node)
    assert done.returncode == 0, done.stdout + done.stderr  # so all sums were right
    assert "12 of 20 pairs of nodes are routes over others" in done.stdout + done.stderr


def test_ctrl_c_on_a_job_takes_the_network_down_too(file):
    before = traces()
    words = [*NETSTORM, "launch", "--wan", file, "--grace", "1", "--", "sh", "-c", "echo on; sleep 60"]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    with job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.endswith(b"on\n"):
                break
        job.send_signal(signal.SIGINT)
        job.stdout.read()
        assert job.wait(60) == 130
    assert nothing_left_since(before)


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="the extra dashboard is not installed")
def test_a_page_outside_shows_a_job_in_the_network(file, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text("import time, netstorm\nwith netstorm.Group():\n    time.sleep(600)\n")
    words = [*NETSTORM, "launch", "--wan", file, "--scheduler", "1", "--dashboard", "--grace", "1"]
    words += ["--", "python", str(script)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True)
    with job:
        assert job.stdout is not None
        found = next(filter(None, (re.search(r"netstorm dashboard: (\S+)", line) for line in job.stdout)))
        nodes = first_update(found[1], nodes=3)["frame"]["nodes"]
        job.send_signal(signal.SIGINT)
        job.stdout.read()
        assert job.wait(60) == 130
    assert [node["site"] for node in nodes] == ["a", "b", ""]
