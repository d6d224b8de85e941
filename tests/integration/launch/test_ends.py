from __future__ import annotations

import os
import signal

from tests.integration.launch.launcher import Launcher, alive, ended, inside, until

DEAF = """
def note_signal(number, frame):
    with open(f"signals-{rank}", "a") as file: file.write(signal.Signals(number).name + "\\n")
signal.signal(signal.SIGINT, note_signal)
signal.signal(signal.SIGTERM, note_signal)
note(os.getpid(), f"handler-{rank}")
while True: time.sleep(0.01)
"""
"""Goes on after SIGINT and SIGTERM."""

GRANDCHILD = """
child = subprocess.Popen(["sleep", "600"], start_new_session={own_session})
note(child.pid)
"""


def signals(launcher: Launcher, rank: int) -> list[str]:
    return (launcher.folder / f"signals-{rank}").read_text().split()


# --------------------------------------------------------------------------------------------------- failures


def test_the_first_failures_rank_and_exit_code_are_reported_and_the_others_may_end_by_themselves(launcher):
    program = """
if rank == 2: sys.exit(3)
while "rank 2 on 127.0.0.1 failed" not in pathlib.Path(".err").read_text(): time.sleep(0.01)
sys.exit(1)
"""
    ended = launcher.run(program, "-n", "3", "--grace", "20")
    assert ended.code == 3
    assert ended.err.splitlines() == [
        "[launch] rank 2 on 127.0.0.1 failed with exit code 3; ranks 0, 1 have 20.5 s to end by themselves",
        "[launch] exit code 1: ranks 0, 1",
        "[launch] rank 2 on 127.0.0.1 failed with exit code 3",
    ]


def test_a_warning_of_netstorms_is_not_given_for_the_reason(launcher):
    program = "sys.stderr.write('12:00:00 netstorm WARNING waiting for 1 of 2 nodes\\n'); sys.exit(3)"
    ended = launcher.run(program, "-n", "1")
    assert "WARNING waiting for 1 of 2 nodes" in ended.err
    assert ended.err.splitlines()[-1] == "[launch] rank 0 on 127.0.0.1 failed with exit code 3"


def test_after_a_failure_the_others_are_interrupted_terminated_and_killed(launcher):
    fails = """
if rank == 1:
    while not os.path.exists("handler-0"): time.sleep(0.01)
    sys.exit(7)
"""
    ended = launcher.run(fails + DEAF, "-n", "2", "--grace", "1")
    assert ended.code == 7
    assert signals(launcher, 0) == ["SIGINT", "SIGTERM"]
    assert ended.err.splitlines()[1:5] == [
        "[launch] not ended 1.5 s after the first failure: sending SIGINT to rank 0",
        "[0] netstorm: ended by the launcher (SIGINT), since rank 1 on 127.0.0.1 failed with exit code 7",
        "[launch] not ended 1 s after SIGINT: sending SIGTERM to rank 0",
        "[launch] not ended 1 s after SIGTERM: sending SIGKILL to rank 0",
    ]


def test_a_command_that_can_be_found_but_not_run_fails_in_words(launcher):
    program = launcher.folder / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    launcher.words = lambda *options: [*Launcher.words(launcher, *options)[:-3], "./broken"]
    ended = launcher.run("", "-n", "1")
    assert ended.code == 127
    assert "[0] netstorm: cannot run './broken': No such file or directory" in ended.err


# ---------------------------------------------------------------------------------------- Ctrl-C and SIGTERM


def test_nodes_that_ignore_ctrl_c_get_sigterm_and_sigkill_after_the_grace_and_end_with_what_they_have_started(
    launcher,
):
    with launcher.started(GRANDCHILD.format(own_session=True) + DEAF, "-n", "2", "--grace", "1") as process:
        until_handlers_are_set(launcher, 2)
        process.send_signal(signal.SIGINT)
        end = ended(process)
        assert not alive(launcher.pids())
    assert end.code == 130
    assert "[launch] Ctrl-C: sending SIGINT to ranks 0, 1" in end.err
    assert signals(launcher, 0) == signals(launcher, 1) == ["SIGINT", "SIGTERM"]
    assert "[launch] killed by SIGKILL: ranks 0, 1" in end.err


def test_a_second_ctrl_c_does_not_wait_for_the_grace(launcher):
    with launcher.started(DEAF, "-n", "1", "--grace", "500") as process:
        until_handlers_are_set(launcher, 1)
        for expected in (["SIGINT"], ["SIGINT", "SIGTERM"]):
            process.send_signal(signal.SIGINT)
            until((launcher.folder / "signals-0").exists, "a signal")
            until(lambda expected=expected: signals(launcher, 0) == expected, f"{expected}")
        process.send_signal(signal.SIGINT)
        assert ended(process).code == 130


def test_sigterm_to_the_launcher_ends_every_node_also_a_stopped_one_and_what_it_has_started(launcher):
    stopped = "if rank == 2: note(os.getpid(), 'handler-2'); os.kill(os.getpid(), signal.SIGSTOP)\n"
    program = GRANDCHILD.format(own_session=True) + stopped + DEAF
    with launcher.started(program, "-n", "3", "--grace", "1") as process:
        until_handlers_are_set(launcher, 3)
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 143
        assert not alive(launcher.pids())
    assert signals(launcher, 0) == signals(launcher, 1) == ["SIGTERM"]


def until_handlers_are_set(launcher, nodes: int) -> None:
    until(lambda: len([*launcher.folder.glob("handler-*")]) == nodes, "the nodes to have their handlers")


# ------------------------------------------------------------------------------ nothing outlives the launcher


def test_what_a_node_leaves_running_is_killed_and_named(launcher):
    ended = launcher.run(GRANDCHILD.format(own_session="rank == 1"), "-n", "2")
    assert ended.code == 0
    assert not alive(launcher.pids())
    assert len(launcher.pids()) == 4
    assert ended.err.count("netstorm: killed what the command had left running: ") == 2


def test_nothing_outlives_a_launcher_that_was_killed_but_a_folder_that_the_next_one_removes(launcher):
    temporary = launcher.folder / "temporary"
    temporary.mkdir()
    program = GRANDCHILD.format(own_session=True) + DEAF
    with launcher.started(program, "-n", "2", TMPDIR=str(temporary)) as process:
        until_handlers_are_set(launcher, 2)
        process.kill()
        until(lambda: not inside(launcher.folder), "all processes to end")
    assert len(launcher.pids()) == 4
    assert signals(launcher, 0) == ["SIGTERM"]
    assert len([*temporary.iterdir()]) == 1
    assert launcher.run("", "-n", "1", TMPDIR=str(temporary)).code == 0
    assert [*temporary.iterdir()] == []


def test_nothing_outlives_a_launcher_that_was_killed_while_it_starts(launcher):
    with launcher.started(DEAF, "-n", "4") as process:
        launcher.wait_for_pids(1)
        process.kill()
        until(lambda: not inside(launcher.folder), "all processes to end")


def test_a_node_whose_supervisor_is_killed_dies_with_it_and_all_that_it_has_started(launcher):
    program = "note(os.getppid(), f'supervisor-{rank}')\n" + GRANDCHILD.format(own_session=True) + DEAF
    with launcher.started(program, "-n", "2", "--grace", "0.2") as process:
        until_handlers_are_set(launcher, 2)
        os.kill(int((launcher.folder / "supervisor-1").read_text()), signal.SIGKILL)
        end = ended(process)
        assert not alive(launcher.pids())
    assert "[launch] rank 1 on 127.0.0.1 was killed by SIGKILL" in end.err
    assert end.code == 137
