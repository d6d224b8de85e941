"""What jobs with priorities know of each other on one host, and how their windows yield."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from netstorm.errors import SettingsError
from netstorm.pslite.host_traffic import SharedTraffic
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
    assert window.resume_at == pytest.approx(0.2)  # a tenth of the link is its own
    assert window.allows(100, 0.1)
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
from netstorm.pslite.host_traffic import SharedTraffic
traffic = SharedTraffic(2, Path(sys.argv[1])).towards("10.0.0.2")
traffic.sends(600.0)
print("sends", flush=True)
sys.stdin.read()
"""


def higher_s(folder: Path, priority: int, host: str = "10.0.0.2") -> float:
    return SharedTraffic(priority, folder).towards(host).higher_s()


def test_processes_of_a_host_see_who_sends_where_and_rows_of_a_dead_one_are_free_again(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", ANOTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        early = SharedTraffic(1, tmp_path).towards("10.0.0.2")
        assert process.stdout.readline() == b"sends\n"
        assert 500 < early.higher_s() <= 600
        assert higher_s(tmp_path, 1, "10.0.0.3") == 0.0
        assert higher_s(tmp_path, 2) == 0.0
        process.kill()
    SharedTraffic(3, tmp_path).towards("10.0.0.4")  # takes a free row: that of the dead process
    assert higher_s(tmp_path, 1) == 0.0


def test_a_table_that_others_may_write_is_refused(tmp_path: Path):
    SharedTraffic(1, tmp_path)
    [table] = tmp_path.iterdir()
    table.chmod(0o666)
    with pytest.raises(SettingsError, match="is not this user's alone"):
        SharedTraffic(1, tmp_path)
    table.unlink()
    table.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="needs shared memory"):
        SharedTraffic(1, tmp_path)


def test_a_job_goes_on_without_its_priority_where_the_table_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("netstorm.pslite.host_traffic._ROWS", 3)
    monkeypatch.setattr("netstorm.pslite.host_traffic._BYTES", 8 * 13)
    traffic = SharedTraffic(1, tmp_path)
    for host in ("a", "b", "c", "a"):
        traffic.towards(host)
    unshared = traffic.towards("d")
    unshared.sends(5.0)
    assert unshared.higher_s() == 0.0
    assert "no priority towards d: NETSTORM_JOB_PRIORITY:" in caplog.text
    assert "has no free row of 3" in caplog.text
