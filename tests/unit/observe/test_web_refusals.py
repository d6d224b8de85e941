"""What a web server refuses is counted, and logged now and then."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from netstorm import clock
from netstorm.observe.web import WebRefusals


def test_all_are_counted_and_one_line_a_minute_says_so(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    refusals = WebRefusals()
    for _ in range(50):
        refusals.note("wrong_token", "192.0.2.1")
    now += 61.0
    refusals.note("wrong_token", "192.0.2.2")
    assert refusals.counts() == {"wrong_token": 51}
    assert [record.getMessage() for record in caplog.records] == [
        "web pages: refused a client at 192.0.2.1: wrong_token",
        "web pages: refused a client at 192.0.2.2: wrong_token (and 49 others since the last such line)",
    ]


def test_the_counts_are_metrics():
    refusals, registry = WebRefusals(), CollectorRegistry()
    refusals.register(registry)
    refusals.note("slow", "192.0.2.1")
    assert b'netstorm_web_refused_total{reason="slow"} 1.0' in generate_latest(registry)
