"""What jobs with priorities know of each other on one host, and how their windows yield."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from netstorm.errors import SettingsError
from netstorm.pslite.host_traffic import SharedHostTraffic
from netstorm.pslite.sending import SendQueueItem, YieldingWindow

CHUNK = 100_000


class Traffic:
    """Others' traffic, as a test says."""

    def __init__(self) -> None:
        self.higher = 0.0
        self.said: list[float] = []

    def higher_s(self) -> float:
        return self.higher

    def sends(self, seconds: float) -> None:
        self.said.append(seconds)


def sent(window: YieldingWindow, now: float, size: int = CHUNK) -> SendQueueItem:
    message = SendQueueItem(b"x" * size)
    assert window.allows(message.size, now)
    window.sent(message, now)
    return message


def test_values_wait_while_others_of_higher_priority_send_and_small_messages_do_not():
    traffic = Traffic()
    window = YieldingWindow(traffic)
    sent(window, 0.0)
    assert traffic.said
    traffic.higher = 0.3
    assert not window.allows(CHUNK, 0.1)
    assert window.resume_at == pytest.approx(0.4)
    assert window.allows(100, 0.1)
    assert window.resume_at == math.inf
    traffic.higher = 0.0
    assert window.allows(CHUNK, 0.2)


def test_a_tenth_of_the_link_is_left_to_who_waits():
    traffic = Traffic()
    window = YieldingWindow(traffic)
    now = 0.0
    for _ in range(20):  # 1 MB/s
        message = sent(window, now)
        now += CHUNK / 1e6
        window.acknowledged(message, now)
    traffic.higher = 0.01
    began, chunks = now, 0
    while now < began + 10:
        if window.allows(CHUNK, now):
            message = sent(window, now)
            now += CHUNK / 1e6
            window.acknowledged(message, now)
            chunks += 1
        else:
            assert now < window.resume_at <= now + 0.01 + 1e-9
            now = window.resume_at
    assert 9 <= chunks <= 11


ANOTHER = """
import sys
from pathlib import Path
from netstorm.pslite.host_traffic import SharedHostTraffic
traffic = SharedHostTraffic(2, Path(sys.argv[1]))
traffic.sends(600.0)
print("sends", flush=True)
sys.stdin.read()
"""


def test_processes_of_a_host_see_who_sends_and_the_place_of_a_dead_one_is_free_again(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", ANOTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sends\n"
        assert 500 < SharedHostTraffic(1, tmp_path).higher_s() <= 600
        assert SharedHostTraffic(2, tmp_path).higher_s() == 0.0
        process.kill()
    own = SharedHostTraffic(1, tmp_path)
    assert own.higher_s() == 0.0
    own.sends(5.0)
    assert SharedHostTraffic(0, tmp_path).higher_s() == 0.0  # the same process: its only place


def test_a_table_that_others_may_write_is_refused(tmp_path: Path):
    SharedHostTraffic(1, tmp_path)
    [table] = tmp_path.iterdir()
    table.chmod(0o666)
    with pytest.raises(SettingsError, match="is not this user's alone"):
        SharedHostTraffic(1, tmp_path)
    table.unlink()
    table.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="needs shared memory"):
        SharedHostTraffic(1, tmp_path)


def test_a_full_table_is_an_error(tmp_path: Path, monkeypatch: Any):
    numbers = iter(range(1, 1000))
    monkeypatch.setattr("netstorm.pslite.host_traffic.os.getpid", lambda: next(numbers))
    monkeypatch.setattr("netstorm.pslite.host_traffic.os.kill", lambda *_: None)
    for _ in range(64):
        SharedHostTraffic(1, tmp_path)
    with pytest.raises(SettingsError, match="64 processes use"):
        SharedHostTraffic(1, tmp_path)
