"""Who may see the web pages of a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import SettingsError
from netstorm.observe.web import Page, WebRefusals, pages, read_token, web_access, with_token
from netstorm.settings import Settings

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "web.token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def status_of(application, **environ):
    said = []
    body = b"".join(application(environ, lambda status, headers: said.append((status, dict(headers)))))
    return said[0][0], said[0][1], body


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_an_address_of_this_machine_alone_needs_no_token(host):
    access = web_access(Settings(http_bind=host))
    assert (access.token, access.tls, access.scheme) == (None, None, "http")


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "10.0.0.1", "node1", "127.0.0.1.example.org"])
def test_an_address_that_others_reach_is_refused_without_a_token_and_the_two_ways_out_are_named(host):
    with pytest.raises(SettingsError) as refused:
        web_access(Settings(http_bind=host))
    text = str(refused.value)
    assert f"NETSTORM_HTTP_BIND={host}" in text
    assert "NETSTORM_WEB_TOKEN_FILE" in text
    assert "NETSTORM_SECURITY=off" in text
    assert "\n" not in text


def test_with_security_off_everybody_may_see_the_pages():
    assert web_access(Settings(http_bind="*", security="off")).token is None


def test_a_token_opens_an_address_to_others_and_plain_http_is_a_warning(token_file, caplog):
    access = web_access(Settings(http_bind="*", web_token_file=str(token_file)))
    assert access.token == TOKEN
    assert "NETSTORM_WEB_CERT" in caplog.text
    assert TOKEN not in caplog.text + repr(access)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_token_that_others_can_read_is_refused(token_file, mode):
    token_file.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600") as refused:
        read_token(token_file, "--token-file")
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9092", "200"),
        ("127.0.0.1", "200"),
        ("[::1]:9092", "200"),
        ("10.0.0.7:80", "200"),
        ("localhost:9092", "200"),
        ("LOCALHOST", "200"),
        ("tokyo.example:9092", "200"),
        (None, "200"),
        ("evil.example", "421"),
        ("evil.example:9092", "421"),
        ("127.0.0.1.evil.example", "421"),
        ("localhost.evil.example:9092", "421"),
        ("", "421"),
    ],
)
def test_a_page_without_a_token_is_not_shown_under_somebody_elses_name(host, status):
    """A browser would let a page of evil.example, whose name leads to 127.0.0.1, read it."""
    answers: list[str] = []
    refusals = WebRefusals()
    access = web_access(Settings(scheduler_host="Tokyo.example"))
    guarded = access.guard(pages({"/": Page("text/plain", lambda: b"the job")}), refusals)
    environ = {"REQUEST_METHOD": "GET", "REMOTE_ADDR": "127.0.0.1", "PATH_INFO": "/"}
    if host is not None:
        environ["HTTP_HOST"] = host

    def start(status: str, *_: Any) -> Any:
        answers.append(status)

    shown = b"".join(guarded(environ, start))
    assert answers[0].startswith(status)
    assert (shown == b"the job") == (status == "200")
    assert refusals.counts() == ({} if status == "200" else {"wrong_host": 1})


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two lines\n" * 3, b"\xff" * 40, b"a b" * 20, b"x" * 2000]
)
def test_what_is_no_token_is_refused_without_being_repeated(token_file, content):
    token_file.write_bytes(content)
    with pytest.raises(SettingsError, match="expected one line") as refused:
        read_token(token_file, "--token-file")
    assert content == b"" or content.decode(errors="replace").strip() not in str(refused.value)


def test_a_token_s_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"nothing'.*No such file"):
        read_token(tmp_path / "nothing", "--token-file")


def test_a_token_may_come_through_a_pipe():
    reading, writing = os.pipe()
    os.write(writing, TOKEN.encode())
    os.close(writing)
    try:
        assert read_token(Path(f"/dev/fd/{reading}"), "--token-file") == TOKEN
    finally:
        os.close(reading)


def test_a_key_without_a_certificate_and_a_certificate_that_is_none_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="without NETSTORM_WEB_CERT"):
        web_access(Settings(web_key="key.pem"))
    with pytest.raises(SettingsError, match="No such file"):
        web_access(Settings(web_cert=str(tmp_path / "nothing")))
    (tmp_path / "cert").write_text("no PEM")
    with pytest.raises(SettingsError, match="PEM form"):
        web_access(Settings(web_cert=str(tmp_path / "cert")))


SHOWN = with_token(pages({"/": Page("text/plain", lambda: b"the job")}), TOKEN, WebRefusals())


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_who_bears_the_token_sees_the_page(scheme):
    status, _, body = status_of(
        SHOWN, REQUEST_METHOD="GET", PATH_INFO="/", HTTP_AUTHORIZATION=f"{scheme} {TOKEN}"
    )
    assert (status, body) == ("200 OK", b"the job")


@given(st.one_of(st.text(max_size=60), st.sampled_from([TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}"])))
def test_nobody_else_sees_anything(given_header):
    status, headers, body = status_of(
        SHOWN, REQUEST_METHOD="GET", PATH_INFO="/", HTTP_AUTHORIZATION=given_header
    )
    assert status == "401 Unauthorized"
    assert headers["WWW-Authenticate"].startswith("Bearer")
    assert b"--token-file" in body
    assert TOKEN.encode() not in body


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "", "get"]
)
def test_no_method_but_get_and_head_reaches_a_page(method):
    made = []

    def make() -> bytes:
        made.append(1)
        return b"the job"

    application = pages({"/": Page("text/plain", make)})
    assert status_of(application, REQUEST_METHOD=method, PATH_INFO="/")[0].startswith("405")
    assert made == []
