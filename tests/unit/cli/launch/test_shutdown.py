"""How a job ends, and what is told about its members."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.cli.launch.shutdown import (
    SCHEDULER,
    Abandon,
    Explain,
    Member,
    Report,
    SendSignal,
    Shutdown,
    in_words,
    outcome,
)

# -------------------------------------------------------------------------------------------------- shutdown


GRACE_S = 10.0
FAILURE_TIMEOUT_S = 20.0


def started(nodes: int = 3, *, scheduler: bool = True, **options) -> Shutdown:
    shutdown = Shutdown(nodes, grace_s=GRACE_S, failure_timeout_s=FAILURE_TIMEOUT_S, **options)
    for member in [SCHEDULER] * scheduler + [*range(nodes)]:
        shutdown.started(Member(member))
    return shutdown


def sent(actions) -> list[tuple[tuple[int, ...], str]]:
    return [(action.members, action.signal.name) for action in actions if isinstance(action, SendSignal)]


def reported(actions) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Report))


def exit_all(shutdown: Shutdown, *codes: int, now: float = 1.0) -> None:
    for rank, code in enumerate(codes):
        shutdown.exited(Member(rank), code, now)


def test_a_job_whose_processes_all_end_well_is_over_with_code_0_and_nothing_to_say():
    shutdown = started()
    over = []
    for member in (0, 1, 2, SCHEDULER):
        assert shutdown.exited(Member(member), 0, 2.0) == []
        over.append(shutdown.is_over)
    assert over == [False, False, False, True]
    assert (shutdown.exit_code, shutdown.summary(), shutdown.deadline) == (0, [], None)


def test_the_first_failure_gives_its_rank_and_exit_code_however_the_others_end():
    shutdown = started()
    assert "rank 2 failed with exit code 3; ranks 0, 1 have 20 s" in reported(
        shutdown.exited(Member(2), 3, 0.0)
    )
    assert shutdown.exited(Member(0), 1, 1.0) == []
    shutdown.exited(Member(1), 137, 1.0)
    shutdown.exited(SCHEDULER, 0, 1.0)
    assert shutdown.exit_code == 3
    assert shutdown.summary() == [
        "killed by SIGKILL: rank 1",
        "exit code 1: rank 0",
        "exit code 0: the scheduler",
        "rank 2 failed with exit code 3",
    ]


def test_after_a_failure_the_others_are_left_alone_and_then_pushed_up_the_ladder():
    shutdown = started()
    shutdown.exited(Member(2), 3, 0.0)
    assert shutdown.tick(FAILURE_TIMEOUT_S - 0.1) == []
    assert sent(shutdown.tick(FAILURE_TIMEOUT_S)) == [((0, 1), "SIGINT")]
    shutdown.exited(Member(0), 1, FAILURE_TIMEOUT_S + 1)
    assert sent(shutdown.tick(FAILURE_TIMEOUT_S + GRACE_S)) == [((1,), "SIGTERM")]
    assert sent(shutdown.tick(FAILURE_TIMEOUT_S + 2 * GRACE_S)) == [((1,), "SIGKILL")]


@pytest.mark.parametrize(
    ("reason", "first"),
    [
        (signal.SIGINT, "SIGINT"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGHUP, "SIGTERM"),  # the terminal is lost
        (signal.SIGPIPE, "SIGTERM"),  # or the reader of the output
    ],
)
def test_a_signal_stops_the_nodes_and_not_the_scheduler_which_tells_them_of_each_other(reason, first):
    shutdown = started()
    assert sent(shutdown.stop_requested(reason, 0.0)) == [((0, 1, 2), first)]
    assert shutdown.exit_code == 128 + reason


def test_each_step_of_the_ladder_is_said_and_taken_once():
    shutdown = started()
    shutdown.stop_requested(signal.SIGINT, 0.0)
    actions = [action for tenth in range(1, 350) for action in shutdown.tick(tenth / 10)]
    assert sent(actions) == [((0, 1, 2), "SIGTERM"), ((0, 1, 2), "SIGKILL")]
    assert (
        sum("SIGTERM" in action.text for action in actions if isinstance(action, Report)) == 2
    )  # …, and its end


def test_a_second_ctrl_c_takes_the_next_step_at_once():
    shutdown = started()
    shutdown.stop_requested(signal.SIGINT, 0.0)
    assert sent(shutdown.stop_requested(signal.SIGINT, 0.1)) == [((0, 1, 2), "SIGTERM")]
    assert sent(shutdown.stop_requested(signal.SIGINT, 0.2)) == [((0, 1, 2), "SIGKILL")]


def test_what_ends_because_of_ctrl_c_is_no_failure_and_the_exit_code_is_130():
    shutdown = started()
    shutdown.stop_requested(signal.SIGINT, 0.0)
    exit_all(shutdown, 1, 130, 0)
    shutdown.exited(SCHEDULER, 0, 1.0)
    assert shutdown.exit_code == 130
    assert shutdown.summary()[0] == "killed by SIGINT: rank 1"


def test_ctrl_c_after_a_failure_hurries_and_keeps_the_failures_exit_code():
    shutdown = started()
    shutdown.exited(Member(2), 3, 0.0)
    assert sent(shutdown.stop_requested(signal.SIGINT, 1.0)) == [((0, 1), "SIGINT")]
    assert shutdown.exit_code == 3


def test_a_scheduler_that_stays_after_a_good_job_is_stopped_and_that_is_no_failure():
    shutdown = started()
    exit_all(shutdown, 0, 0, 0)
    assert sent(shutdown.tick(1.0 + GRACE_S)) == [((SCHEDULER,), "SIGINT")]
    assert sent(shutdown.tick(1.0 + 2 * GRACE_S)) == [((SCHEDULER,), "SIGKILL")]
    shutdown.exited(SCHEDULER, 137, 22.0)
    assert shutdown.exit_code == 0


def test_a_scheduler_that_stays_after_a_stopped_job_is_stopped_soon():
    shutdown = started()
    shutdown.stop_requested(signal.SIGINT, 0.0)
    exit_all(shutdown, 130, 130, 130)
    assert sent(shutdown.tick(3.0)) == [((SCHEDULER,), "SIGINT")]


def test_a_scheduler_that_is_killed_first_is_the_first_failure_and_its_signal_gives_128_more():
    shutdown = started()
    assert "the scheduler was killed by SIGSEGV; ranks 0-2 have 20 s" in reported(
        shutdown.exited(SCHEDULER, 139, 0.0)
    )
    exit_all(shutdown, 1, 1, 1)
    assert shutdown.exit_code == 139


def test_the_scheduler_knows_who_was_first_even_if_others_end_sooner():
    shutdown = started()
    shutdown.exited(Member(0), 1, 0.0)
    shutdown.exited(Member(2), 3, 0.2)
    shutdown.first_failure_reported(Member(2))
    shutdown.exited(SCHEDULER, 1, 0.3)
    shutdown.exited(Member(1), 1, 0.4)
    assert shutdown.exit_code == 3
    assert shutdown.summary()[-1] == "rank 2 failed with exit code 3"


def test_a_scheduler_that_reports_a_failed_job_is_not_what_failed():
    shutdown = started()
    shutdown.first_failure_reported(None, "the job has failed")
    assert "the job has failed; ranks 0-2 have 20 s" in reported(shutdown.exited(SCHEDULER, 1, 0.0))
    exit_all(shutdown, 0, 5, 1)
    assert shutdown.exit_code == 5
    assert shutdown.summary()[-1] == "rank 1 failed with exit code 5"


def test_a_failed_job_whose_nodes_all_end_well_has_failed():
    shutdown = started()
    shutdown.first_failure_reported(Member(2), "job 'default' has failed: rank 2 is lost")
    exit_all(shutdown, 0, 0, 0)
    shutdown.exited(SCHEDULER, 1, 1.0)
    assert shutdown.exit_code == 1
    assert shutdown.summary()[-1] == "job 'default' has failed: rank 2 is lost"


def test_a_blamed_node_that_had_to_be_killed_does_not_hide_who_failed():
    shutdown = started(2)
    shutdown.exited(Member(0), 1, 0.0)
    shutdown.tick(FAILURE_TIMEOUT_S)
    shutdown.exited(Member(1), 137, FAILURE_TIMEOUT_S)
    shutdown.first_failure_reported(Member(1))
    shutdown.exited(SCHEDULER, 1, FAILURE_TIMEOUT_S + 1)
    assert shutdown.exit_code == 1


def test_a_job_is_over_when_all_nodes_have_been_started_and_all_have_ended_in_any_order():
    shutdown = started()
    for member in (SCHEDULER, 0, 1):
        shutdown.exited(Member(member), 0, 0.0)
        assert not shutdown.is_over
    shutdown.exited(Member(2), 0, 0.0)
    assert (shutdown.is_over, shutdown.exit_code) == (True, 0)
    begins = Shutdown(2, grace_s=GRACE_S, failure_timeout_s=FAILURE_TIMEOUT_S)
    begins.started(Member(0))
    begins.exited(Member(0), 0, 0.0)
    assert not begins.is_over


def test_after_a_scheduler_that_fails_at_the_start_no_node_is_started():
    shutdown = Shutdown(3, grace_s=GRACE_S, failure_timeout_s=FAILURE_TIMEOUT_S)
    shutdown.started(SCHEDULER)
    shutdown.exited(SCHEDULER, 2, 0.0)
    assert shutdown.is_over
    assert not shutdown.may_start
    assert shutdown.summary() == [
        "not started: ranks 0-2",
        "the scheduler failed with exit code 2",
    ]


def test_ctrl_c_while_the_scheduler_starts_stops_it():
    shutdown = Shutdown(3, grace_s=GRACE_S, failure_timeout_s=FAILURE_TIMEOUT_S)
    shutdown.started(SCHEDULER)
    assert sent(shutdown.stop_requested(signal.SIGINT, 0.0)) == [((SCHEDULER,), "SIGINT")]
    shutdown.exited(SCHEDULER, 130, 0.0)
    assert shutdown.is_over
    assert shutdown.exit_code == 130


def test_a_process_that_cannot_be_started_fails_the_job():
    shutdown = started(2)
    assert "cannot start rank 2: no memory" in reported(
        shutdown.launch_failed("cannot start rank 2: no memory", 0.0)
    )
    assert shutdown.exit_code == 1
    assert sent(shutdown.tick(FAILURE_TIMEOUT_S)) == [((0, 1), "SIGINT")]


def test_what_does_not_die_of_sigkill_is_given_up_and_its_host_is_named():
    shutdown = started(2, hosts={Member(0): "tokyo", Member(1): "alice@paris"}, is_remote=True)
    for second in range(3):
        shutdown.stop_requested(signal.SIGINT, float(second))
    shutdown.exited(Member(0), 137, 3.0)
    actions = shutdown.tick(10.0)
    assert Abandon((Member(1),)) in actions
    assert "processes may be left on alice@paris" in reported(actions)


def test_a_failure_of_ssh_is_told_from_one_of_the_command():
    shutdown = started(2, hosts={Member(1): "alice@paris"}, is_remote=True)
    assert "rank 1 on alice@paris failed with exit code 255 (ssh's own" in reported(
        shutdown.exited(Member(1), 255, 0.0)
    )


EVENTS = st.one_of(
    st.tuples(st.just("exit"), st.integers(-1, 3), st.sampled_from([0, 0, 1, 3, 137, 143])),
    st.tuples(
        st.just("stop"), st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
    ),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 11.0, 25.0])),
)


@given(st.lists(EVENTS, max_size=25), st.booleans())
def test_whatever_happens_only_the_living_are_told_and_once_stopping_the_end_is_bounded(events, scheduler):
    shutdown = started(4, scheduler=scheduler)
    alive = {*range(4)} | ({SCHEDULER} if scheduler else set())
    codes = {}
    now = 0.0

    def check(actions) -> None:
        for action in actions:
            if isinstance(action, SendSignal | Abandon):
                assert action.members
                assert set(action.members) <= alive
            if isinstance(action, Abandon):
                for member in action.members:
                    alive.discard(member)
                    check(shutdown.exited(member, 137, now))

    for kind, *values in events:
        if kind == "exit" and values[0] in alive:
            alive.discard(values[0])
            codes[values[0]] = values[1]
            check(shutdown.exited(Member(values[0]), values[1], now))
        elif kind == "stop":
            check(shutdown.stop_requested(values[0], now))
        elif kind == "wait":
            now += values[0]
            check(shutdown.tick(now))
        assert shutdown.is_over == (not alive)
    check(shutdown.stop_requested(signal.SIGTERM, now))
    for _ in range(12):
        if shutdown.deadline is not None:
            now = shutdown.deadline
            check(shutdown.tick(now))
    assert shutdown.is_over
    ended_well = all(codes.get(rank) == 0 for rank in range(4))
    assert (shutdown.exit_code != 0) or ended_well
    assert bool(shutdown.summary()) == (shutdown.exit_code != 0)


def test_ranks_that_agree_on_the_end_after_sigterm_and_exit_with_0_are_a_job_that_ended_well():
    shutdown = started()
    assert sent(shutdown.stop_requested(signal.SIGTERM, 0.0)) == [((0, 1, 2), "SIGTERM")]
    exit_all(shutdown, 0, 0, 0)
    shutdown.exited(SCHEDULER, 0, 2.0)
    assert (shutdown.exit_code, shutdown.summary()) == (0, [])


def test_a_rank_that_dies_of_sigterm_is_none_that_has_agreed():
    shutdown = started()
    shutdown.stop_requested(signal.SIGTERM, 0.0)
    exit_all(shutdown, 0, 143, 0)
    shutdown.exited(SCHEDULER, 1, 2.0)
    assert shutdown.exit_code == 143


def test_the_last_line_of_the_summary_names_rank_host_exit_code_and_last_words_of_the_first_failure():
    shutdown = started(hosts={Member(rank): f"host{rank}" for rank in range(3)})
    shutdown.exited(Member(1), 1, 0.0, last_line="ImportError: no module named x")
    exit_all(shutdown, 1, now=0.5)
    shutdown.exited(Member(2), 1, 0.5, last_line="netstorm.errors.NodeLost: rank 1")
    shutdown.exited(SCHEDULER, 1, 0.6)
    assert shutdown.summary()[-1] == (
        "rank 1 on host1 failed with exit code 1: ImportError: no module named x"
    )


def test_before_the_job_has_begun_the_others_have_a_short_time_and_each_is_told_why_it_is_ended():
    shutdown = started(tells_begin=True, hosts={Member(1): "paris"})
    shutdown.exited(Member(1), 1, 0.0, last_line="ImportError: x")
    shutdown.exited(Member(2), 1, 0.3)
    assert shutdown.deadline == 2.0
    actions = shutdown.tick(2.0)
    assert sent(actions) == [((0,), "SIGTERM")]
    (why,) = (action for action in actions if isinstance(action, Explain))
    assert why.members == (0,)
    assert "rank 1 on paris failed with exit code 1: ImportError: x" in why.text


def test_who_has_come_to_the_scheduler_hears_of_a_failure_and_has_the_usual_time():
    """However busy the machine is: its error says more than the launcher's."""
    shutdown = started(4, tells_begin=True)
    shutdown.came(Member(0))
    shutdown.came(Member(1))
    shutdown.exited(Member(1), 1, 0.0)
    assert shutdown.deadline == FAILURE_TIMEOUT_S
    shutdown.came(Member(2))
    shutdown.exited(Member(0), 1, 0.3)
    assert shutdown.deadline == FAILURE_TIMEOUT_S
    shutdown.exited(Member(2), 1, 0.4)
    assert shutdown.deadline == 2.0
    shutdown.came(Member(3))
    assert shutdown.deadline == FAILURE_TIMEOUT_S


def test_once_the_job_has_begun_the_others_have_the_usual_time():
    shutdown = started(tells_begin=True)
    shutdown.begun()
    shutdown.exited(Member(1), 1, 0.0)
    assert shutdown.deadline == FAILURE_TIMEOUT_S


# --------------------------------------------------------------------------------------------------- members


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7, 8"),
        ([SCHEDULER], "the scheduler"),
        ([SCHEDULER, 3], "rank 3 and the scheduler"),
    ],
)
def test_members_are_named_briefly(members, words):
    assert in_words(map(Member, members)) == words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (139, "killed by SIGSEGV"),
        (130, "killed by SIGINT"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_code_above_128_is_a_signal(code, words):
    assert outcome(code) == words
