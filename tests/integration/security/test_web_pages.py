"""The web pages of a job, for those who may see them and for all others."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from netstorm.observe import web
from netstorm.observe.web import Page, WebAccess, WebRefusals, WebServer, pages, web_access
from netstorm.settings import Settings
from tests.integration.scheduler.scripted import SchedulerProcess, wait_for

TOKEN = "0123456789abcdef0123456789abcdef"
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that is its own issuer, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-subj", "/CN=netstorm", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "web.token"
    path.touch(0o600)
    path.write_text(TOKEN)
    return path


@contextlib.contextmanager
def served(access: WebAccess = WebAccess(), refusals: WebRefusals | None = None):  # noqa: B008 - it cannot be changed
    refusals = refusals or WebRefusals()
    shown = access.guard(pages({"/": Page("text/plain", lambda: b"the job")}), refusals)
    with WebServer(shown, "127.0.0.1", [0], name="pages", tls=access.tls, refusals=refusals) as server:
        yield server.port


def ask(port: int, method: str = "GET", *, tls: ssl.SSLContext | None = None, bearer: str = ""):
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=LIMIT_S, context=tls)
    ) as connection:
        connection.request(method, "/", headers={"Authorization": f"Bearer {bearer}"} if bearer else {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def answer_to(port: int, sent: bytes) -> bytes:
    """Return the first line that is answered to raw bytes; empty: the connection was closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as client:
        heard = b""
        with contextlib.suppress(OSError):  # the server may close before it has read everything
            client.sendall(sent)
            while b"\r\n" not in heard and (more := client.recv(4096)):
                heard += more
        return heard.partition(b"\r\n")[0]


def test_a_page_is_shown_to_those_who_bear_the_token_and_can_only_be_looked_at():
    refusals = WebRefusals()
    with served(WebAccess(TOKEN), refusals) as port:
        assert ask(port)[0] == 401
        assert b"--token-file" in ask(port, bearer=f"{TOKEN}x")[1]
        assert ask(port, bearer=TOKEN) == (200, b"the job")
        assert ask(port, "HEAD", bearer=TOKEN) == (200, b"")
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(port, method, bearer=TOKEN)[0] == 405
    assert refusals.counts() == {"no_token": 1, "wrong_token": 1}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 16_384 + b" HTTP/1.0\r\n\r\n", b"414"),
        (b"GET / HTTP/1.0\r\nx: " + b"a" * 16_384 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.0\r\n" + b"x: y\r\n" * 101 + b"\r\n", b"431"),
    ],
)
def test_a_request_that_is_too_large_is_refused(sent, status):
    refusals = WebRefusals()
    with served(refusals=refusals) as port:
        # What the server did not read may reset the connection before the client has read the answer.
        assert answer_to(port, sent)[9:12] in (status, b"")
        assert ask(port) == (200, b"the job")
    assert refusals.counts() == {f"http_{status.decode()}": 1}


def drip(client: socket.socket) -> None:
    """Send a byte at a time until the server hangs up."""
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            client.sendall(b"x")
            if select.select([client], [], [], 0.02)[0] and not client.recv(4096):
                return
        raise AssertionError("the server waits for ever")


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_slow_sender_is_hung_up_on(monkeypatch, certificate, encrypted):
    monkeypatch.setattr(web, "_LONGEST_S", 0.3)
    access = web_access(Settings(web_cert=str(certificate[0]), web_key=str(certificate[1])))
    refusals = WebRefusals()
    with (
        served(access if encrypted else WebAccess(), refusals) as port,
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as client,
    ):
        client.sendall(
            b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xf0" if encrypted else b"GET /"
        )  # a ClientHello of 16 kB
        drip(client)
    assert refusals.counts()["slow"] == 1


@pytest.mark.parametrize("encrypted", [False, True])
def test_idle_connections_keep_nobody_out_and_threads_are_few(certificate, encrypted):
    access = web_access(Settings(web_cert=str(certificate[0]), web_key=str(certificate[1])))
    tls = ssl.create_default_context(cafile=certificate[0]) if encrypted else None
    refusals = WebRefusals()
    with served(access if encrypted else WebAccess(), refusals) as port, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        assert ask(port, tls=tls) == (200, b"the job")
        own = [thread for thread in threading.enumerate() if thread.name == "netstorm-web"]
        assert len(own) <= 32
        counts = refusals.counts()
        assert counts.get("crowded", 0) + counts.get("full", 0) >= 100 + 1 - 16


def test_whoever_has_asked_does_not_make_room_for_idle_connections():
    waiting, go = threading.Event(), threading.Event()

    def slow() -> bytes:
        waiting.set()
        assert go.wait(LIMIT_S)
        return b"the job"

    with (
        WebServer(pages({"/": Page("text/plain", slow)}), "127.0.0.1", [0], name="pages") as server,
        contextlib.ExitStack() as stack,
    ):
        found = []
        client = threading.Thread(target=lambda: found.append(ask(server.port)))
        client.start()
        assert waiting.wait(LIMIT_S)
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S))
            for _ in range(3 * 16)
        ]
        assert idle[0].recv(1) == b""  # there was no room for all
        go.set()
        client.join(LIMIT_S)
        assert found == [(200, b"the job")]


def test_pages_are_encrypted_with_the_given_certificate(certificate):
    access = web_access(Settings(web_cert=str(certificate[0]), web_key=str(certificate[1])))
    with served(access) as port, socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S):
        assert ask(port, tls=ssl.create_default_context(cafile=certificate[0])) == (200, b"the job")
        assert answer_to(port, b"GET / HTTP/1.0\r\n\r\n") == b""
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, tls=ssl.create_default_context())


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(certificate, tmp_path):
    locked = tmp_path / "locked.pem"
    subprocess.run(
        [
            *("openssl", "ec", "-in", str(certificate[1]), "-out", str(locked)),
            *("-aes256", "-passout", "pass:1234"),
        ],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ValueError, match="not encrypted"):
        web_access(Settings(web_cert=str(certificate[0]), web_key=str(locked)))


def test_a_scheduler_that_strangers_could_watch_does_not_begin(tmp_path):
    with SchedulerProcess(tmp_path, NETSTORM_HTTP_BIND="0.0.0.0") as scheduler:
        assert scheduler.exit_code() == 2
        (line,) = scheduler.output().splitlines()
        assert "NETSTORM_WEB_TOKEN_FILE" in line
        assert "NETSTORM_SECURITY=off" in line
        assert not scheduler.ready_file.exists()


def test_top_watches_a_scheduler_that_has_a_token_and_a_certificate(
    tmp_path, token_file, certificate, monkeypatch
):
    for name in [name for name in os.environ if name.startswith(("NETSTORM_", "DMLC_"))]:
        monkeypatch.delenv(name)

    def top(*options: str):
        return CliRunner().invoke(app, ["top", "--once", "--json", *options])

    with SchedulerProcess(
        tmp_path,
        NETSTORM_HTTP_BIND="0.0.0.0",
        NETSTORM_WEB_TOKEN_FILE=str(token_file),
        NETSTORM_WEB_CERT=str(certificate[0]),
        NETSTORM_WEB_KEY=str(certificate[1]),
    ) as scheduler:
        wait_for(lambda: "watch it with" in scheduler.output(), "the address to watch")
        command = scheduler.output().partition("watch it with: netstorm top --scheduler ")[2].split()
        address = f"127.0.0.1:{command[0].rpartition(':')[2]}"
        assert command == [f"https://0.0.0.0:{address[10:]}", "--token-file", str(token_file)]
        ca, token = ("--ca", str(certificate[0])), ("--token-file", str(token_file))

        seen = top("--scheduler", address, *ca, *token)
        assert (seen.exit_code, json.loads(seen.stdout)["phase"]) == (0, "gathering")
        for options, text in (
            (ca, "wants a token: --token-file FILE"),
            (token, "https://HOST:PORT"),
            (("--scheduler", f"https://{address}", *token), "certificate is not trusted"),
        ):
            refused = top("--scheduler", address, *options)
            assert refused.exit_code == 2
            assert text in refused.stderr
            assert refused.stdout == ""

        request = urllib.request.Request(
            f"https://{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        tls = ssl.create_default_context(cafile=certificate[0])
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=tls) as answer:
            text = answer.read()
        assert b"netstorm_job" in text
        assert b'netstorm_web_refused_total{reason="no_token"} 1.0' in text
        scheduler.signal(signal.SIGTERM)
        assert scheduler.exit_code() == 143
        assert TOKEN not in scheduler.output()
