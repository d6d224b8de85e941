"""What nodes say of themselves."""

from __future__ import annotations

import logging

import pytest

from netstorm.protocol.messages import NodeStatus
from netstorm.scheduler.snapshot import MOST_CHARACTERS, Announcements


def says(text: str) -> NodeStatus:
    """Return a report of a node that compresses."""
    return NodeStatus(
        rounds=1, round_s=1.0, waited_s=0.0, bytes_sent=1, clock_offset=0.0, clock_drift=0.0, compression=text
    )


def test_the_log_says_once_how_gradients_travel_though_all_ranks_report_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    announcements = Announcements(2)
    said = [(0, "auto"), (1, "auto"), (0, "auto: int8"), (0, "auto: int8"), (1, "auto"), (1, "auto: int8")]
    with caplog.at_level(logging.INFO, "netstorm"):
        for now, (rank, text) in enumerate(said):
            announcements.record_status(rank, says(text), 5.0 * now)
    assert [one.message for one in caplog.records] == ["compression: auto", "compression: auto: int8"]


def test_a_node_cannot_fill_the_log_or_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    announcements = Announcements(1)
    with caplog.at_level(logging.INFO, "netstorm"):
        for number in range(100):
            text = f"{number}\n" + "x" * 1000
            announcements.record_status(0, says(text), 0.01 * number)
    [logged] = caplog.records
    assert "\n" not in logged.message
    assert len(logged.message) <= MOST_CHARACTERS + len("compression: ")
