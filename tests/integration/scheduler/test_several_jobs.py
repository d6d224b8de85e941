"""One scheduler process with several jobs: joined by launchers, watched from outside, ended by a signal."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from netstorm.protocol import messages as m
from tests.integration.forking import ROOT
from tests.integration.jobs import run_netstorm
from tests.integration.scheduler.scripted import SchedulerProcess, ScriptedNode

MEET = """
from netstorm.kvstore.process.runtime import runtime_of_this_process
runtime = runtime_of_this_process()
runtime.barrier()
print(runtime.settings.job, runtime.rank)
"""


def netstorm(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "netstorm", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_two_launchers_run_a_job_each_on_one_scheduler(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    with SchedulerProcess(tmp_path, "--jobs", "2") as scheduler:
        where = ("-n", "2", "--join", f"127.0.0.1:{scheduler.port}")
        jobs = {
            name: netstorm("launch", *where, "--job", name, "--", sys.executable, str(script))
            for name in ("alice", "bob")
        }
        for name, launcher in jobs.items():
            out, err = launcher.communicate(timeout=90)
            assert launcher.returncode == 0, err
            assert sorted(out.splitlines()) == [f"[{rank}] {name} {rank}" for rank in range(2)]
        assert scheduler.exit_code() == 0
        assert "job 'alice' has ended well" in scheduler.output()
        assert "job 'bob' has ended well" in scheduler.output()
        assert scheduler.output().endswith("2 jobs have ended, 0 of them have failed\n")


def test_several_jobs_are_watched_by_name_and_a_signal_ends_them_all(tmp_path):
    with SchedulerProcess(tmp_path, "--jobs", "forever") as scheduler, contextlib.ExitStack() as stack:
        port = scheduler.port
        nodes = [
            stack.enter_context(ScriptedNode(port, rank, job=job)) for job in ("a", "b") for rank in range(2)
        ]
        for node in nodes:
            node.hears(m.Joined)
        scheduler.says("watch it with")
        found = re.search(r"netstorm top --scheduler (\S+)", scheduler.output())
        assert found is not None
        watched = found[1]
        status = json.loads(get(watched, "/status.json?job=b"))
        assert (status["job"], status["phase"], len(status["nodes"])) == ("b", "running", 2)
        assert {line["job"] for line in status["jobs"]} == {"a", "b"}
        joined = {
            sample.labels["job"]: sample.value
            for family in text_string_to_metric_families(get(watched, "/metrics"))
            for sample in family.samples
            if sample.name == "netstorm_job_nodes_here"
        }
        assert joined == {"a": 2.0, "b": 2.0}
        undecided = run_netstorm(tmp_path, "top", "--once", "--scheduler", watched)
        assert re.search("has 2 jobs: (a, b|b, a); say which", undecided.err)
        chosen = run_netstorm(tmp_path, "top", "--once", "--scheduler", watched, "--job", "b")
        assert "job b  running" in chosen.out
        scheduler.signal(signal.SIGTERM)
        for node in nodes:
            assert "SIGTERM" in node.hears(m.PeerGone).reason
            node.leave()
        assert scheduler.exit_code() == 143
        assert "job 'b' has failed" in scheduler.output()
