"""What the launcher says of ranks that have ended: all others hear it, whether the job has begun or not."""

from __future__ import annotations

import math

import msgspec
import pytest

from netstorm.errors import PeerError
from netstorm.protocol import messages as m
from netstorm.scheduler.launched_ranks import LONGEST_LINE, RankEnded, read_rank_ended
from netstorm.scheduler.snapshot import NOBODY_JOINED, JobPhase
from tests.unit.scheduler.driving import Driven, running

WHY = "exit code 1; last line of its error output: ImportError: x"


def end(driven: Driven, rank: int, code: int = 1, line: bytes = b"ImportError: x", *, again=False) -> None:
    how = f"exit code {code}" if code < 128 else "killed by SIGKILL"
    ended = RankEnded.of(rank, code, how, "paris", line if code else b"", again=again)
    driven.machine.rank_ended(ended, driven.now)
    driven.run(2.5)


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_dies_before_all_have_joined_is_named_to_those_that_wait(joined):
    driven = Driven(3)
    driven.join("n0", rank=0)
    if joined:
        driven.join("n1", rank=1)
    end(driven, 1)
    gone = driven.gone("n0")
    assert (gone.rank, gone.kind) == (1, "lost")
    assert WHY in gone.reason
    assert joined or gone.reason == f"rank 1 (paris) ended before all nodes had joined: {WHY}"


def test_a_rank_that_exits_with_0_and_never_joins_is_named_once_others_wait_for_it():
    driven = Driven(2)
    end(driven, 1, 0)
    assert driven.machine.outcome is None
    driven.join("n0", rank=0)
    assert "rank 1 (paris) ended before all nodes had joined: exit code 0" in driven.gone("n0").reason


def test_ranks_that_come_after_that_are_told_the_same_and_the_scheduler_waits_for_them():
    driven = Driven(3)
    end(driven, 1)
    driven.join("n0", rank=0)
    assert driven.gone("n0").reason.endswith(f"rank 1 (paris) ended before all nodes had joined: {WHY}")
    driven.run(60.0)
    assert driven.machine.phase is JobPhase.FAILED
    driven.join("n2", rank=2)
    assert WHY in driven.gone("n2").reason
    end(driven, 0)
    end(driven, 2)
    assert driven.machine.outcome is not None
    assert (driven.machine.outcome.exit_code, driven.machine.outcome.rank) == (1, 1)


def test_a_job_that_no_process_joins_ends_with_a_code_of_its_own_and_says_what_to_write():
    driven = Driven(2)
    end(driven, 0, 0)
    assert driven.machine.next_tick() < math.inf  # it is not over
    end(driven, 1, 0)
    assert driven.exit_code() == NOBODY_JOINED
    assert driven.machine.outcome is not None
    assert 'init_process_group("netstorm")' in driven.machine.outcome.text
    assert "python -m netstorm.run" in driven.machine.outcome.text


@pytest.mark.parametrize(
    ("code", "how"), [(3, "exit code 3"), (137, "killed by SIGKILL"), (0, "exit code 0")]
)
def test_a_member_whose_process_has_ended_is_lost_at_once_however_it_ended(code, how):
    driven = running(3)
    end(driven, 1, code)
    for rank in (0, 2):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (1, "lost")
        assert f"rank 1 (n1:4000, site1) is lost: its process has ended: {how}" in gone.reason


def test_what_a_process_has_said_itself_counts_more_than_how_it_ended():
    driven = running(2)
    ended = RankEnded.of(1, 1, "exit code 1", "paris", b"ValueError: boom", again=False)
    driven.machine.rank_ended(ended, driven.now)
    driven.say(1, m.Failed(reason="ValueError: boom"))
    driven.run(1.0)
    assert driven.gone(0).kind == "failed"


def test_a_process_that_ends_after_all_have_finished_has_left():
    driven = running(2)
    for rank in (0, 1):
        driven.say(rank, m.Finished(last_rounds={}))
    for rank in (0, 1):
        end(driven, rank, 0)
    assert driven.exit_code() == 0
    assert driven.machine.next_tick() == math.inf


def test_an_elastic_job_waits_for_a_rank_that_is_started_again_and_begins_without_one_that_is_not():
    driven = Driven(3, elastic=(2, 3))
    driven.join("n0", rank=0)
    driven.join("n2", rank=2)
    end(driven, 1, again=True)
    assert driven.machine.peers == ()
    end(driven, 1)
    assert driven.machine.phase is JobPhase.RUNNING
    assert driven.machine.peers == (driven.peers["n0"], driven.peers["n2"])


def test_an_elastic_job_that_too_few_can_join_ends():
    driven = Driven(3, elastic=(3, 3))
    driven.join("n0", rank=0)
    end(driven, 1)
    assert WHY in driven.gone("n0").reason


def test_a_line_of_the_launcher_is_read_as_it_was_written_but_for_control_characters():
    line = b"\x1b[31mError: \xff" + "ü".encode() * 400
    ended = RankEnded.of(7, 3, "exit code 3", "paris", line, again=True)
    written = msgspec.json.encode(ended)
    assert len(written) < LONGEST_LINE
    assert read_rank_ended(written) == ended
    assert "\x1b" not in ended.last_line
    assert len(ended.last_line) == 300
    assert "\n" not in read_rank_ended(written.replace(b"Error", b"\\nError")).last_line


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"SIGTERM", b'{"rank":-1,"code":0,"how":"x","host":"y"}', b"\xff"]
)
def test_other_lines_are_refused(line):
    with pytest.raises(PeerError, match="a line of the launcher"):
        read_rank_ended(line)
