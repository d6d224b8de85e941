"""The dashboard's web server: who sees the page, and how often the scheduler is asked."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="the extra dashboard is not installed")

from netstorm.dashboard.page import STATIC, report
from netstorm.dashboard.recording import JobRecord
from netstorm.dashboard.server import Feed, PageGuard, live_app, replay_app
from netstorm.errors import Unavailable
from netstorm.lab.testing.watched_job import large_job

LIMIT_S = 30.0


def ask(app: Any, path: str = "/", query: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of an answer."""
    named = {"host": "127.0.0.1:8787", **headers}
    scope = {
        "type": "http", "method": "GET", "scheme": "http", "http_version": "1.1", "root_path": "",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "server": ("127.0.0.1", 8787), "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    sent: list[Any] = []
    asked = [{"type": "http.request", "body": b""}]

    async def receive() -> Any:
        if not asked:
            await asyncio.Event().wait()  # the client does not hang up
        return asked.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start, *bodies = sent
    head = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], head, b"".join(body.get("body", b"") for body in bodies).decode()


def recording(text: str = "runs") -> dict[str, JobRecord]:
    frame = msgspec.Raw(msgspec.json.encode({"job": "a", "text": text}))
    return {"a": JobRecord(frames=[frame], points=[], events=[], policies=[])}


def test_the_page_may_load_nothing_from_elsewhere_and_is_asked_for_by_names_of_this_machine_alone():
    app = replay_app(recording(), PageGuard(None, ("node1",)))
    status, head, body = ask(app)
    assert (status, "<title>NetStorm</title>" in body) == (200, True)
    assert head["content-security-policy"].startswith("default-src 'self';")
    assert head["x-content-type-options"] == "nosniff"
    assert ask(app, host="node1:80")[0] == 200
    assert ask(app, host="[::1]:80")[0] == 200
    assert ask(app, host="evil.example")[0] == 421
    assert ask(app, "/recording.json", host="evil.example")[0] == 421
    assert ask(app, "/../server.py")[0] == 404
    assert json.loads(ask(app, "/recording.json")[2])["a"]["frames"] == [{"job": "a", "text": "runs"}]


def test_with_a_token_only_who_has_the_link_sees_anything():
    app = replay_app(recording(), PageGuard("secret-secret-secret"))
    for path in ("/", "/recording.json", "/app.js", "/events"):
        assert ask(app, path)[0] == 401
        assert ask(app, path, "token=wrong")[0] == 401
    status, head, _ = ask(app, "/", "token=secret-secret-secret")
    assert (status, head["location"]) == (303, "/")
    cookie = head["set-cookie"]
    assert "HttpOnly" in cookie
    assert ask(app, "/recording.json", cookie=cookie.partition(";")[0])[0] == 200
    assert ask(app, "/recording.json", cookie="netstorm-8787=other")[0] == 401
    assert ask(app, "/", "token=secret-secret-secret", host="evil.example")[0] == 421


def test_the_files_of_the_page_name_no_other_host():
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"(https?:)?//[a-z]+\.", text), path
        assert "innerHTML" not in text
        assert not re.search(r"\bon[a-z]+=|style=", text), path


def test_a_report_has_everything_inside_and_runs_its_own_scripts_alone():
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = report(recording(hostile))
    assert hostile not in page
    (data,) = re.findall(r'<script type="application/json" id="recording">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data)["a"]["frames"][0]["text"] == hostile
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';")
    for kind in ("script", "style"):
        inside = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside}
        assert len(hashes) == {"script": 6, "style": 1}[kind]
        assert (
            set(re.findall(r"sha256-([^']+)'", policy.partition(f"{kind}-src")[2].partition(";")[0]))
            == hashes
        )
    assert not re.search(r'src="|href="(?!data:|#)', page)


class Scheduler:
    """Answers with the status of a job, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.version = 1
        self.gone = False

    def read(self, job: str | None) -> Any:
        self.asked += 1
        if self.gone:
            raise Unavailable("127.0.0.1:9092: connection refused")
        return large_job(3, time=100.0 + self.asked, version=self.version)


async def next_update(stream: Any) -> Any:
    while True:
        message = await asyncio.wait_for(anext(stream), LIMIT_S)
        if message.startswith(b"data: "):
            return json.loads(message.removeprefix(b"data: "))


def test_all_viewers_get_everything_first_then_what_is_new_from_one_poll_for_all():
    async def watch() -> None:
        scheduler = Scheduler()
        feed = Feed(scheduler.read)
        polling = asyncio.create_task(feed.run())
        streams = [feed.stream(None) for _ in range(3)]
        first = await asyncio.gather(*map(next_update, streams))
        assert all(update["reset"] and update["frame"]["policy"] == 1 for update in first)
        before = scheduler.asked
        scheduler.version = 2
        second = await asyncio.gather(*map(next_update, streams))
        while second[0]["frame"]["policy"] == 1:
            second = await asyncio.gather(*map(next_update, streams))
        assert [update["policies"][0]["version"] for update in second] == [2, 2, 2]
        assert [update["events"][0][2][:9] for update in second] == ["Policy 2:"] * 3
        assert scheduler.asked <= before + 3
        scheduler.gone = True
        lost = await next_update(streams[0])
        while "lost" not in lost:
            lost = await next_update(streams[0])
        assert lost["lost"] == "127.0.0.1:9092: connection refused"
        late = await next_update(feed.stream(None))
        assert (late["frame"]["policy"], late["lost"]) == (2, lost["lost"])
        feed.end()
        await asyncio.wait_for(polling, LIMIT_S)
        left = [message async for message in streams[0]]
        assert len(left) <= 8  # then the stream ends

    asyncio.run(watch())


def test_a_live_page_is_told_that_there_is_no_recording():
    async def build() -> Any:
        return live_app(Feed(Scheduler().read), PageGuard(None))

    assert ask(asyncio.run(build()), "/recording.json")[0] == 204
