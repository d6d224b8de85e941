from __future__ import annotations

import logging

import pytest

from netstorm.observe.log import Counters, Drops


def test_counters_add_up_and_a_snapshot_does_not_change():
    counters = Counters()
    counters.add("sent")
    counters.add("sent", 2.5)
    snapshot = counters.snapshot()
    counters.add("sent")
    assert snapshot == {"sent": 3.5}
    assert counters.get("sent") == 4.5
    assert counters.get("never touched") == 0


@pytest.fixture
def drops(caplog):
    caplog.set_level(logging.WARNING)
    return Drops(Counters())


def test_the_first_of_a_kind_is_logged_and_then_one_in_a_while(drops, caplog):
    for second in range(25):
        drops.note("frame", "rank 3", "nonsense", float(second))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "dropped a message from rank 3: nonsense",
        "dropped a message from rank 3: nonsense (and 9 more since)",
        "dropped a message from rank 3: nonsense (and 9 more since)",
    ]


def test_senders_and_reasons_are_told_apart(drops, caplog):
    for sender in ("rank 1", "rank 2"):
        for reason in ("frame", "checksum"):
            drops.note(reason, sender, "nonsense", 0.0)
    assert len(caplog.records) == 4


def test_everything_is_counted_also_what_is_not_logged():
    counters = Counters()
    drops = Drops(counters)
    for _ in range(100):
        drops.note("frame", "rank 1", "nonsense", 0.0)
    assert counters.snapshot() == {"dropped_frame": 100}


def test_senders_that_are_made_up_cannot_fill_the_memory(drops):
    for number in range(2500):
        drops.note("frame", f"10.0.0.{number}", "nonsense", 0.0)
    assert len(drops._quiet) <= 1024


def test_many_senders_make_few_lines_and_all_are_counted(caplog):
    counters = Counters()
    drops = Drops(counters)
    for sender in range(5000):
        drops.note("frame", f"connection {sender}", "nonsense", 1.0 + sender / 1e4)
    assert counters.get("dropped_frame") == 5000
    assert len(caplog.records) == 20
    drops.note("frame", "connection x", "nonsense", 20.0)
    assert caplog.messages[-1].endswith("nonsense (and 4980 from others)")


def test_a_long_quotation_is_cut(caplog):
    Drops(Counters()).note("frame", "a", "x" * 1_000_000, 1.0)
    assert len(caplog.messages[0]) < 600
