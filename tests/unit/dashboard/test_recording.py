"""Recordings: bounded files of statuses, and what a page gets of them."""

from __future__ import annotations

import itertools
import json
import stat

import msgspec
import pytest

from netstorm.dashboard.recording import StatusRecorder, page_data, read_recording
from netstorm.errors import UsageError
from netstorm.lab.testing.watched_job import large_job

STATUS = msgspec.structs.replace(large_job(9, time=0.0), links=())


def at(second: float, job: str = "a"):
    return msgspec.structs.replace(STATUS, time=second, job=job, text=f"second {second:g}")


def recorded(path, statuses, most=10**9):
    recorder = StatusRecorder(path, most)
    for status in statuses:
        recorder.add(status)
    recorder.close()
    return path


def test_what_was_recorded_is_read_again_and_only_its_owner_can(tmp_path):
    statuses = [at(second) for second in range(5)]
    path = recorded(tmp_path / "job.jsonl", statuses)
    assert list(read_recording(path)) == statuses
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text().splitlines()[0])["text"] == "second 0"


def test_a_full_file_keeps_the_whole_time_in_larger_steps(tmp_path):
    size = len(msgspec.json.encode(at(0))) + 1
    path = tmp_path / "job.jsonl"
    recorder = StatusRecorder(path, 21 * size)
    for second in range(1000):
        recorder.add(at(second))
        assert path.stat().st_size <= 21 * size + 200  # texts of seconds have one to three figures
    recorder.close()
    times = [status.time for status in read_recording(path)]
    steps = {after - before for before, after in itertools.pairwise(times)}
    assert times[0] == 0
    assert times[-1] >= 1000 - 2 * max(steps)
    assert 8 <= len(times) <= 21
    assert max(steps) <= 2 * 1000 / 10
    assert list(tmp_path.iterdir()) == [path]


def test_each_of_several_jobs_is_thinned_by_itself(tmp_path):
    size = len(msgspec.json.encode(at(0))) + 1
    statuses = [at(second, job) for second in range(100) for job in ("a", "b")]
    path = recorded(tmp_path / "jobs.jsonl", statuses, 20 * size)
    jobs = [status.job for status in read_recording(path)]
    assert abs(jobs.count("a") - jobs.count("b")) <= 1
    assert page_data(path).keys() == {"a", "b"}


def test_a_page_gets_as_many_frames_as_have_room_the_last_one_always(tmp_path):
    path = recorded(tmp_path / "job.jsonl", [at(second) for second in range(200)])
    record = page_data(path, most_bytes=60_000)["a"]
    times = [msgspec.json.decode(frame)["time"] for frame in record.frames]
    assert 5 <= len(times) < 200
    assert (times[0], times[-1]) == (0, 199)
    assert sum(map(len, record.frames)) <= 70_000
    assert len(record.points) == 200
    assert [policy.version for policy in record.policies] == [1]


def test_a_line_that_its_writer_could_not_end_is_left_out(tmp_path):
    path = recorded(tmp_path / "job.jsonl", [at(1), at(2)])
    path.write_bytes(path.read_bytes()[:-10])
    assert [status.time for status in read_recording(path)] == [1]


@pytest.mark.parametrize("line", ['{"rounds": 3}\n', "no JSON\n", '{"time": "soon"}\n', "\xff\n"])
def test_a_line_that_is_no_status_is_named(tmp_path, line):
    path = recorded(tmp_path / "job.jsonl", [at(1)])
    path.write_bytes(path.read_bytes() + line.encode("latin-1"))
    with pytest.raises(UsageError, match=r"job\.jsonl:2: expected a job's status"):
        list(read_recording(path))


def test_files_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match=r"empty\.jsonl: expected a recording"):
        page_data(tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match=r"none\.jsonl: the recording cannot be read: No such file"):
        page_data(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match=r"cannot be written: No such file"):
        StatusRecorder(tmp_path / "folder" / "job.jsonl", 10**6)
