from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from netstorm.cli.launch.output import Lines


def lines_of(*pieces: bytes) -> list[bytes]:
    lines = Lines()
    return [line for piece in pieces for line in lines.feed(piece)] + lines.end()


@given(st.text("ab\n", max_size=30), st.lists(st.integers(0, 30)))
def test_lines_do_not_depend_on_how_they_are_cut_into_pieces(text, cuts):
    data = text.encode()
    ends = sorted({cut for cut in cuts if cut <= len(data)} | {0, len(data)})
    pieces = [data[begin:end] for begin, end in pairwise(ends)]
    assert lines_of(*pieces) == [line.encode() for line in text.splitlines()]


def test_a_line_without_an_end_is_shown_as_unfinished_and_passed_on_when_the_stream_ends():
    lines = Lines()
    assert lines.feed(b"loss ") == []
    assert lines.unfinished == b"loss "
    assert lines.end() == [b"loss "]
    assert lines.end() == []


def test_of_a_progress_bar_only_the_last_state_becomes_a_line():
    assert lines_of(b"\r 10%", b"\r 20", b"%\r100%\nnext\n") == [b"100%", b"next"]


def test_what_a_terminal_would_show_of_a_progress_bar_is_known_at_any_time():
    lines = Lines()
    lines.feed(b"10%\r")
    assert lines.unfinished == b"10%"
    lines.feed(b"20")
    assert lines.unfinished == b"20"


def test_a_bar_that_its_program_wipes_away_leaves_nothing():
    assert lines_of(b"\r100%\r    \r", b"done\n") == [b"done"]


def test_windows_line_ends_are_line_ends():
    assert lines_of(b"one\r", b"\ntwo\r\n") == [b"one", b"two"]


def test_empty_lines_stay():
    assert lines_of(b"\n\na\n") == [b"", b"", b"a"]


def test_a_line_that_never_ends_is_passed_on_before_it_fills_the_memory():
    lines = Lines()
    out = [line for _ in range(40) for line in lines.feed(b"x" * 65536)]
    assert len(out) == 2
    assert len(b"".join(out) + lines.unfinished) == 40 * 65536
