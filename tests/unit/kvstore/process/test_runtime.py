"""The threads that end calls, and who has the word when a signal comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from netstorm.kvstore.process.runtime import CompletionThread, SignalWatch


class Watcher:
    """Stands for the I/O thread: the tests poll."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        pass

    def unwatch(self, fd: int) -> None:
        pass


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def watching() -> Iterator[tuple[SignalWatch, list[str]]]:
    interruptions: list[str] = []
    watch = SignalWatch(Watcher(), interruptions.append)
    try:
        yield watch, interruptions
    finally:
        watch.close()


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_scripts_has_the_word_whenever_it_was_installed(number, when):
    flag: list[int] = []

    def install() -> None:
        signal.signal(number, lambda *_: flag.append(1))

    if when == "before":
        install()
    with watching() as (watch, interruptions):
        if when == "after":
            install()
        send(number)
        watch.poll()
    assert (flag, interruptions) == ([1], [])
    assert number.name in watch.last


def test_a_handler_that_calls_the_one_before_it_does_not_end_the_process():
    flag: list[int] = []
    with watching() as (watch, interruptions):
        former = signal.getsignal(signal.SIGTERM)

        def both(number, frame) -> None:  # as Lightning composes them
            flag.append(1)
            assert callable(former)
            former(number, frame)

        signal.signal(signal.SIGTERM, both)
        send(signal.SIGTERM)
        watch.poll()
    assert (flag, interruptions) == ([1], [])


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_without_one_the_process_ends_and_the_job_hears_which_signal_it_was(number, raised):
    with watching() as (watch, interruptions):
        with pytest.raises(raised):
            send(number)
        watch.poll()
    assert len(interruptions) == 1
    assert number.name in interruptions[0]


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with watching() as (watch, interruptions):
        send(signal.SIGTERM)
        watch.poll()
    assert interruptions == []


def test_an_event_loop_that_was_there_before_hears_of_its_signals():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        with watching() as (watch, _):
            send(signal.SIGUSR1)
            watch.poll()
        assert os.read(reading, 8) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(writing) == writing
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def test_watches_may_end_in_the_order_in_which_they_began():
    before = signal.set_wakeup_fd(-1)
    try:
        with contextlib.ExitStack() as newer:
            with watching():
                watch, _ = newer.enter_context(watching())
            signal.signal(signal.SIGTERM, lambda *_: None)
            send(signal.SIGTERM)
            watch.poll()
            assert watch.last == "SIGTERM"
        assert signal.set_wakeup_fd(before) == -1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)


def test_an_event_loop_that_began_later_keeps_its_descriptor():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(-1)
    try:
        with watching():
            signal.set_wakeup_fd(writing)
        assert signal.set_wakeup_fd(before) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


# --------------------------------------------------------------------------------- the thread that ends calls


DEADLINE_S = 30


def test_what_a_continuation_waits_for_is_ended_by_another_thread_however_deep():
    thread = CompletionThread("completion")
    assert thread.for_caller() is thread
    depths = []
    all_ended = threading.Event()

    def continuation(depth: int) -> None:
        depths.append(depth)
        if depth < 3:
            ended = threading.Event()
            inner = thread.for_caller()
            inner.run(lambda: continuation(depth + 1))
            inner.run(ended.set)
            assert ended.wait(DEADLINE_S)
        else:
            all_ended.set()

    thread.run(lambda: continuation(0))
    assert all_ended.wait(DEADLINE_S)
    thread.close()
    assert depths == [0, 1, 2, 3]
    assert thread.for_caller() is thread


def test_a_continuation_that_raises_leaves_the_next_one_its_turn(caplog):
    thread = CompletionThread("completion")
    ended = threading.Event()

    def fails() -> None:
        raise ValueError("the user's")

    thread.run(fails)
    thread.run(ended.set)
    assert ended.wait(DEADLINE_S)
    thread.close()
    assert "a continuation of a NetStorm call failed" in caplog.text
