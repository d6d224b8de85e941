"""Vans with keys, for tests of who may connect to whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from netstorm.observe.log import Counters
from netstorm.pslite.admission import Credentials
from netstorm.pslite.keys import JobKey, key_text
from netstorm.pslite.van import VanEvent
from netstorm.pslite.zeromq import ZmqVan

__all__ = ["KeyedVan", "events_of", "poll_all"]


class KeyedVan:
    """A van that listens on loopback, and what it counts."""

    def __init__(self, credentials: Credentials | JobKey | None, **options: Any) -> None:
        if isinstance(credentials, JobKey):
            credentials = Credentials.of_process(credentials)
        self.user = "" if credentials is None else key_text(credentials.own.public)
        self.counters = Counters()
        self.van = ZmqVan(counters=self.counters, credentials=credentials, **options)
        self.port = self.van.bind("127.0.0.1", 0)
        self.events: list[VanEvent] = []


def poll_all(wanted: Callable[[], object], *vans: KeyedVan, seconds: float = 20.0) -> None:
    """Let vans work until something has happened; fail if it does not happen in time."""
    deadline = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < deadline, [(one.events, one.counters.snapshot()) for one in vans]
        for one in vans:
            one.events += one.van.poll(0.01)


def events_of(one: KeyedVan, kind: type) -> list[Any]:
    """Return what a van has reported so far, of one kind."""
    return [event for event in one.events if isinstance(event, kind)]
