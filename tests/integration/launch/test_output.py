from __future__ import annotations

import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.launch.launcher import PATIENCE_S, PREAMBLE


def test_each_line_begins_with_its_rank_keeps_its_stream_and_arrives_as_it_was(launcher):
    program = r"""
print('to out', rank)
print('to err', rank, file=sys.stderr)
if rank == 1:  # a progress bar, of which a file gets the last state only
    for i in range(5): print(f'\r{i + 1}/5', end='')
    print('\ndone')
if rank == 2:
    while sum(1 for _ in pathlib.Path().glob("pid-*")) < 3: time.sleep(0.01)
    os.write(1, b'\xff\x00\xfe\n')  # no text
    sys.stderr.write('last words')
    sys.exit(3)
"""
    with launcher.piped(program, "-n", "3") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert sorted(out.splitlines()) == [
        *(b"[0] to out 0", b"[1] 5/5", b"[1] done", b"[1] to out 1", b"[2] to out 2", b"[2] \xff\x00\xfe")
    ]
    lines = err.decode().splitlines()
    assert {f"[{rank}] to err {rank}" for rank in range(3)} <= {*lines}
    failed = next(
        place for place, line in enumerate(lines) if line.startswith("[launch] rank 2 on 127.0.0.1")
    )
    assert lines[failed].split("; ")[0].endswith("failed with exit code 3: last words")
    assert lines.index("[2] last words") < failed


def test_lines_of_many_nodes_never_mix_and_none_is_lost_where_both_streams_are_one_file(launcher):
    program = """
for line in range(200):
    for stream, name in ((sys.stdout, "o"), (sys.stderr, "e")):
        for piece in (f"{name}{line}:", str(rank) * 9000, "\\n"):
            stream.write(piece)
"""
    launcher.program.write_text(PREAMBLE + program)
    done = subprocess.run(
        launcher.real_words("-n", "3"),
        cwd=launcher.folder,
        env=launcher.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    lines = done.stdout.splitlines()
    for rank in range(3):
        for name in "oe":
            mine = [line for line in lines if line.startswith(f"[{rank}] {name}")]
            assert mine == [f"[{rank}] {name}{line}:{str(rank) * 9000}" for line in range(200)]
    assert len(lines) == 3 * 2 * 200


def test_prefixes_can_be_left_out_and_lines_kept_in_a_file_for_each_rank(launcher):
    program = "print('out', rank)\nprint('err', rank, file=sys.stderr)"
    ended = launcher.run(program, "-n", "2", "--no-prefix", "--log-dir", "logs/today")
    assert sorted(ended.out.splitlines()) == ["out 0", "out 1"]
    for rank in range(2):
        path = launcher.folder / f"logs/today/rank-{rank}.log"
        assert sorted(path.read_text().splitlines()) == [f"err {rank}", f"out {rank}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_reader_that_leaves_ends_the_job(launcher):
    with launcher.piped("while True: print('y' * 1000)", "-n", "2") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 141
    assert b"nobody reads the output any more: sending SIGTERM to ranks 0, 1" in err


def test_nodes_wait_for_a_slow_reader_and_ctrl_c_gets_through_all_the_same(launcher):
    program = "note(os.getpid(), 'writing')\nwhile True: print('y' * 1000)"
    with launcher.piped(program, "-n", "1") as process:
        launcher.wait_for_pids(1)
        time.sleep(0.5)  # nothing marks the moment at which every buffer is full
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130


# ---------------------------------------------------------------------------------------------- on a terminal


@contextmanager
def on_a_terminal(
    launcher, program: str, *options: str, **variables: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run the launcher as a shell in a terminal would: we hold the other end of its controlling terminal."""
    launcher.program.write_text(PREAMBLE + program)
    ours, theirs = pty.openpty()
    take_it = (
        "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", take_it, *launcher.real_words(*options)],
        cwd=launcher.folder,
        env=launcher.environment(TERM="xterm", **variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield ours, process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        assert select.select([terminal], [], [], PATIENCE_S)[0], f"no {text!r} in {seen!r}"
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the other end has closed
            pytest.fail(f"no {text!r} in {seen!r}")
    return seen


def test_on_a_terminal_ranks_have_colours(launcher):
    with on_a_terminal(launcher, "print('end', rank)", "-n", "2") as (terminal, process):
        seen = read_until(terminal, b"end 1\r\n")
        assert re.search(rb"\x1b\[\d+m\[1\] \x1b\[0mend 1", seen)
        assert process.wait(PATIENCE_S) == 0


def test_on_a_terminal_a_progress_bar_is_shown_while_it_moves_and_wiped_for_whole_lines(launcher):
    program = """
if rank == 0:
    sys.stderr.write("\\r 50% of it"); sys.stderr.flush()
    while not os.path.exists("go"): time.sleep(0.01)
    sys.stderr.write("\\r100% of it\\n")
else:
    while not os.path.exists("seen"): time.sleep(0.01)
    print("a whole line", flush=True)
"""
    with on_a_terminal(launcher, program, "-n", "2", NO_COLOR="1") as (terminal, process):
        assert b"\x1b[3" not in read_until(terminal, b"[0]  50% of it")  # no colours
        (launcher.folder / "seen").touch()
        read_until(terminal, b"\r\x1b[K[1] a whole line\r\n[0]  50% of it")
        (launcher.folder / "go").touch()
        read_until(terminal, b"\r\x1b[K[0] 100% of it\r\n")
        assert process.wait(PATIENCE_S) == 0


def test_on_a_terminal_ctrl_c_reaches_the_nodes_once_and_through_the_launcher_only(launcher):
    program = """
def count(*_):
    with open(f"interrupts-{rank}", "a") as file: file.write("x")
signal.signal(signal.SIGINT, count)
print("up", rank)
while not (os.path.exists("go") and os.path.exists(f"interrupts-{rank}")): time.sleep(0.01)
time.sleep(0.3)  # a second one would come now
"""
    with on_a_terminal(launcher, program, "-n", "1") as (terminal, process):
        read_until(terminal, b"up 0")
        os.write(terminal, b"\x03")
        read_until(terminal, b"Ctrl-C: sending SIGINT to rank 0")
        (launcher.folder / "go").touch()
        assert process.wait(PATIENCE_S) == 130
    assert (launcher.folder / "interrupts-0").read_text() == "x"
