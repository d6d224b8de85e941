"""A running job as it is seen by those who watch it; and clients that mean no good."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from netstorm.cli.main import app
from netstorm.errors import Closed
from netstorm.observe.web import Page, WebServer, pages
from netstorm.pslite.host_addresses import source_towards
from tests.integration.jobs import Job, free_port, run_netstorm
from tests.integration.scheduler.scripted import SchedulerProcess

NODE = """
import pathlib, sys, time
import numpy as np
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.kvstore.operations import Operation

runtime = runtime_of_this_process()
key = runtime.register(0, "w", (1000,), "float32")
values = np.ones(1000, np.float32)
for round in range(4):
    runtime.allreduce(
        Operation(key=key, round=round, source=values.copy(), destination=values, done=lambda _: None)
    )
print("four rounds", flush=True)
while not pathlib.Path(sys.argv[0]).with_name("stop").exists():
    time.sleep(0.02)
"""
FAST = {"PS_HEARTBEAT_INTERVAL": "0.1"}


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, f"no sign of {what}"
        time.sleep(0.02)


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values in a page of metrics, by name and rank."""
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def watched_at(said: str) -> str:
    found = re.search(r"netstorm top --scheduler (\S+)", said)
    assert found is not None, said
    return found[1]


def molest(address: str) -> None:
    """Send what no browser would, and leave connections open with nothing or half a request on them."""
    host, port = address.rsplit(":", 1)
    chance = random.Random(3)
    with contextlib.ExitStack() as stack:
        for sent in (
            b"",
            b"GET",
            b"GET /status.json HTTP/1.1\r\nHost:",
            b"POST /metrics HTTP/1.0\r\nContent-Length: 1000000000\r\n\r\nx",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.0\r\n\r\n",
            b"GET /../../etc/passwd HTTP/1.0\r\n\r\n",
            b"GET /metrics?name[]=%00 HTTP/1.0\r\nAccept: ;;q=x,,\r\n\r\n",
            b"\x00NST\xff" * 20,
            *(chance.randbytes(200) for _ in range(40)),
        ):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with contextlib.suppress(OSError):  # it may have hung up already
                client.sendall(sent)


def test_a_running_job_can_be_watched_and_watchers_do_it_no_harm(tmp_path):
    own_port = free_port()
    with Job(tmp_path, 2, NETSTORM_METRICS_PORT=own_port, **FAST) as job:
        for rank in range(2):
            job.start(rank, NODE, NETSTORM_SITE=f"site{rank}", NETSTORM_LOG="info")
        for rank in range(2):
            job.wait_until_said(rank, "four rounds")
        address = watched_at(job.said(-1))

        def all_reported() -> bool:
            nodes = json.loads(get(address, "/status.json"))["nodes"]
            return [node["rounds"] for node in nodes] == [4, 4]

        wait_for(all_reported, "both nodes to say that four rounds are complete")
        molest(address)

        status = json.loads(get(address, "/status.json"))
        assert [(node["rank"], node["site"], node["state"]) for node in status["nodes"]] == [
            (0, "site0", "running"),
            (1, "site1", "running"),
        ]
        keys = status["keys"]
        assert (status["phase"], status["http"]) == ("running", address)
        assert (keys["count"], keys["bytes"], keys["first"][0]["name"]) == (1, 4000, "w")
        assert status["scheduler"] == job.address

        found = samples(get(address, "/metrics"))
        assert found["netstorm_node_rounds_total", "1"] == 4
        assert found["process_cpu_seconds_total", ""] > 0
        assert "status.json" in get(address, "/")

        own = re.search(r"metrics of this node: http://(\S+)/metrics", job.said(1))
        assert own is not None, job.said(1)
        assert samples(get(own[1], "/metrics"))["netstorm_node_rounds_total", "1"] == 4

        http_port, port = (int(one.rpartition(":")[2]) for one in (address, job.address))
        meant = job.address if http_port == port + 1 else address  # another process may have had that one
        one = run_netstorm(tmp_path, "top", "--json", "--once", "--scheduler", meant)
        assert [node["rounds"] for node in json.loads(one.out)["nodes"]] == [4, 4]
        shown = run_netstorm(tmp_path, "top", "--once", "--scheduler", address, COLUMNS="150")
        assert "site1" in shown.out
        assert "trees" in shown.out
        assert (one.code, shown.code, one.err, shown.err) == (0, 0, "", "")

        (tmp_path / "stop").touch()
        assert [end.code for end in job.end_all()] == [0, 0]
        assert job.end(-1).code == 0


def test_a_port_that_is_taken_is_a_warning_and_another_one_serves(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with SchedulerProcess(tmp_path, NETSTORM_HTTP_PORT=str(port)) as scheduler:
            wait_for(lambda: "netstorm top" in scheduler.output(), "the scheduler to say where it is watched")
            address = watched_at(scheduler.output())
            assert address != f"127.0.0.1:{port}"
            assert f"NETSTORM_HTTP_PORT={port} is taken" in scheduler.output()
            assert json.loads(get(address, "/status.json"))["phase"] == "gathering"
            scheduler.signal(signal.SIGTERM)
            assert scheduler.exit_code() == 143


def test_an_address_that_is_not_this_machine_s_is_a_warning(tmp_path):
    with SchedulerProcess(tmp_path, NETSTORM_HTTP_BIND="192.0.2.1", NETSTORM_SECURITY="off") as scheduler:
        wait_for(lambda: "nobody can watch this job" in scheduler.output(), "a warning")
        assert scheduler.port > 0
        scheduler.signal(signal.SIGTERM)
        assert scheduler.exit_code() == 143
        assert "netstorm top" not in scheduler.output()


def test_port_0_shows_nothing(tmp_path):
    with SchedulerProcess(tmp_path, NETSTORM_HTTP_PORT="0") as scheduler:
        wait_for(lambda: "waiting for 2 nodes" in scheduler.output(), "the scheduler to wait")
        scheduler.signal(signal.SIGTERM)
        assert scheduler.exit_code() == 143
        assert "netstorm top" not in scheduler.output()


def test_top_says_what_to_do_if_there_is_nobody(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nothing is likely to come to listen there at once
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(port))
    end = CliRunner().invoke(app, ["top", "--once"])
    assert end.exit_code == 2
    assert f"DMLC_PS_ROOT_PORT={port}" in end.stderr
    assert "NETSTORM_HTTP_BIND" in end.stderr
    assert end.stdout == ""


def test_top_says_so_if_something_else_answers(tmp_path):
    with WebServer(
        pages({"/status.json": Page("text/html", lambda: b"<html>")}), "127.0.0.1", [0], name="x"
    ) as web:
        end = CliRunner().invoke(app, ["top", "--once", "--scheduler", f"127.0.0.1:{web.port}"])
    assert end.exit_code == 2
    assert "'<html>'" in end.stderr


@pytest.mark.parametrize("address", ["nowhere", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_top_refuses_an_address_that_is_none(address):
    end = CliRunner().invoke(app, ["top", "--once", "--scheduler", address])
    assert end.exit_code == 2
    assert "expected HOST:PORT" in end.stderr


def test_more_connections_than_a_web_server_serves_push_out_the_oldest():
    page = Page("text/plain", lambda: b"here")
    with WebServer(pages({"/": page}), "127.0.0.1", [0], name="x") as web, contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(("127.0.0.1", web.port), timeout=60))
        assert get(f"127.0.0.1:{web.port}", "/") == "here"


@pytest.mark.parametrize(("bind", "hosts"), [("*", ["127.0.0.1", "::1"]), ("::1", ["::1"])])
def test_a_web_server_listens_at_addresses_of_both_families(bind, hosts):
    if not source_towards("::1"):
        pytest.skip("this machine has no IPv6")
    with WebServer(pages({"/": Page("text/plain", lambda: b"hello")}), bind, [0], name="x") as web:
        for host in hosts:
            with contextlib.closing(http.client.HTTPConnection(host, web.port, timeout=10)) as client:
                client.request("GET", "/")
                assert client.getresponse().read() == b"hello"


def test_a_page_that_cannot_be_made_is_an_answer(caplog):
    def fail() -> bytes:
        raise Closed("the job is over")

    def crash() -> bytes:
        raise ZeroDivisionError

    made = {"/closed": Page("text/plain", fail), "/crash": Page("text/plain", crash)}
    with WebServer(pages(made), "127.0.0.1", [0], name="x") as web:
        for path, code, text in (
            ("/closed", 503, "the job is over"),
            ("/crash", 500, "log"),
            ("/no", 404, "/crash"),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(f"127.0.0.1:{web.port}", path)
            assert error.value.code == code
            assert text in error.value.read().decode()
            error.value.close()
