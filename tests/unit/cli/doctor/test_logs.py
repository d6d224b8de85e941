"""Logs of failed jobs, as real ones are, and what the doctor says of them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from netstorm.cli.doctor.logs import Log, explain
from netstorm.cli.main import app

SCHEDULER = """\
16:47:21 netstorm INFO all nodes are here: rank 0 (10.0.0.1:38547), rank 1 (10.0.0.2:39367)
16:47:38 netstorm ERROR the job ends: rank 1 (10.0.0.2:39367) {}
"""
ECHO = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 11, in <module>
[rank0]:     dist.all_reduce(t)
[rank0]: netstorm.errors.NodeFailed: rank 1 (10.0.0.2:39367) {}
"""
TRACEBACK = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 8, in <module>
[rank1]:     work()
[rank1]:   File "/usr/lib/python3/dist-packages/torch/nn.py", line 99, in work
[rank1]:     raise
[rank1]: {}
"""


def logs(**texts: str) -> list[Log]:
    return [
        Log(name=f"logs/{name.replace('_', '-')}.log", lines=tuple(text.splitlines()))
        for name, text in texts.items()
    ]


@pytest.mark.parametrize(
    ("exception", "cause"),
    [
        ("ValueError: bad sample 17", "the script raised an exception: ValueError: bad sample 17"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "memory ran out"),
        ("ModuleNotFoundError: No module named 'foo'", "a package is missing"),
        ("MemoryError", "memory ran out: MemoryError"),
        ("OSError: [Errno 28] No space left on device", "a disk is full"),
        ("OSError: [Errno 24] Too many open files", "there are too few file descriptors"),
        ("netstorm.errors.SettingsError: CHUNK_SIZE='x': expected a whole number", "a setting is wrong"),
    ],
)
def test_an_exception_of_one_rank_is_the_first_cause_and_the_others_only_heard_of_it(exception, cause):
    failed = f"failed: {exception}"
    first, followed = explain(
        logs(
            rank_0=ECHO.format(failed), rank_1=TRACEBACK.format(exception), scheduler=SCHEDULER.format(failed)
        )
    )
    assert first.where == "rank 1 on 10.0.0.2"
    assert first.what.startswith(cause)
    assert first.what.endswith(", at /home/me/train.py:8")
    assert first.do
    assert followed.what == "rank 0 ended because of it"


@pytest.mark.parametrize(
    ("how", "cause", "do"),
    [
        ("is lost: its process has ended: killed by SIGKILL; last line: MemoryWarning", "killed", "dmesg"),
        (
            "is lost: its process has ended: its connections have ended",
            "its process ended before",
            "sys.exit",
        ),
        ("is lost: no answer from 10.0.0.2:39367 for 10 s", "processes do not reach", "--hosts"),
        ("failed with exit code 255 (ssh's own code when it cannot connect)", "ssh did not get", "ssh HOST"),
    ],
)
def test_what_the_scheduler_says_of_a_rank_is_explained(how, cause, do):
    first, *_ = explain(logs(rank_1="step 1\nstep 2\n", scheduler=SCHEDULER.format(how)))
    assert first.where == "rank 1 on 10.0.0.2"
    assert cause in first.what
    assert do in first.do


def test_the_launcher_s_output_alone_is_enough():
    text = (
        "[0] step 1\n[launch] rank 2 on tokyo was killed by SIGKILL: step 9; ranks 0-1 have 20 s to end by "
        "themselves\n[0] [rank0]: netstorm.errors.NodeLost: rank 2 (10.0.0.3:1) is lost\n"
    )
    first, followed = explain(logs(job=text))
    assert first.where == "rank 2 on tokyo"
    assert "was killed by SIGKILL: step 9" in first.what
    assert "20 s" not in first.what
    assert followed.what == "rank 0 ended because of it"


def test_a_rank_that_the_launcher_has_ended_is_not_the_first_cause():
    ended = "netstorm: ended by the launcher (SIGTERM), since rank 1 on tokyo failed with exit code 1: {}\n"
    missing = "ModuleNotFoundError: No module named 'foo'"
    first, *_ = explain(logs(rank_0=ended.format(missing), rank_1=f"{missing}\n"))
    assert first.where == "rank 1 on tokyo"
    assert first.what == f"a package is missing: {missing}"
    first, *_ = explain(logs(rank_0=ended.format(missing)))
    assert first.where == "rank 1 on tokyo"
    assert first.what.startswith("a package is missing: failed with exit code 1")


def test_a_rank_that_comes_when_another_has_failed_already_is_not_the_first_cause():
    late = (
        "netstorm.errors.JoinRefused: the job has already ended: rank 1 (127.0.0.1) ended before all nodes "
        "had joined: exit code 3\n"
    )
    first, *_ = explain(logs(rank_0=late))
    assert first.where == "rank 1 on 127.0.0.1"
    assert first.what == "a process has failed: failed with exit code 3"
    first, *_ = explain(logs(rank_0=late, rank_1="ModuleNotFoundError: No module named 'foo'\n"))
    assert first.where == "rank 1 on 127.0.0.1"
    assert first.what == "a package is missing: ModuleNotFoundError: No module named 'foo'"
    killed = late.replace("exit code 3", "killed by SIGKILL")
    first, *_ = explain(logs(rank_0=killed))
    assert first.what.startswith("a process was killed")


def test_a_job_in_which_nobody_is_to_blame_is_told_as_it_ended():
    text = "16:00:00 netstorm ERROR the job ends: not every node came within 300 s; not here: 1\n"
    (first,) = explain(logs(scheduler=text))
    assert (first.where, first.severity.value) == ("the job", "error")
    assert first.what.startswith("processes do not reach each other")


def test_a_process_that_a_usage_error_has_ended_is_named():
    (first,) = explain(
        logs(rank_3="netstorm: NETSTORM_KEY_FILE: mode 0644 lets others read it: expected 0600\n")
    )
    assert first.where == "rank 3"
    assert first.do == "netstorm env"


def test_logs_of_a_job_that_went_well_have_no_finding_and_exit_code_0(tmp_path):
    (tmp_path / "rank-0.log").write_text("loss 0.1\nErrors: none\n")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 0
    assert "no failure in 2 lines of 1 files" in result.stdout


def test_logs_that_are_not_there_are_a_usage_error(tmp_path):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "none.log")])
    assert result.exit_code == 2
    assert "none.log: cannot read the log: No such file" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x.log", "--serve"], "LOGS with --serve: expected one of them"),
        (["--rates"], "--rates and --write need other hosts"),
        (["--peers", "nowhere"], "--peers 'nowhere': expected HOST:PORT"),
        (["--hosts", "/no/such/file"], "/no/such/file: cannot read the host file"),
    ],
)
def test_wrong_arguments_are_exit_code_2(words, says):
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("10.0.0.2", "10.0.0.2"),
        ("10.0.0.2:39367, tokyo", "10.0.0.2"),
        ("[2001:db8::2]:39367", "[2001:db8::2]"),
        ("2001:db8::2", "2001:db8::2"),
        ("gpu-3", "gpu-3"),
    ],
)
def test_who_ended_before_it_joined_is_named_with_its_host(place, host):
    ended = f"rank 1 ({place}) ended before all nodes had joined: exit code 3"
    (first,) = explain(logs(scheduler=f"16:47:38 netstorm ERROR the job ends: {ended}"))
    assert first.where == f"rank 1 on {host}"
    assert first.what == "a process has failed: failed with exit code 3"
