"""The thread that owns the sockets: calls from other threads, errors, the end."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from netstorm.errors import Closed
from netstorm.lab.testing.recorder import Recorder, part
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Call, Disconnect, Send
from tests.integration.pslite.processes import RealProcess, wait_until


@pytest.fixture
def processes():
    made = []

    def make(rank=0, **options):
        process = RealProcess(rank, **options)
        made.append(process)
        return process

    yield make
    for process in made:
        process.close()


def send(number, payload=None, to=1, order=(0, 0, 0)):
    return Send(peer=Peer(to), message=part(number), payload=payload, order=order)


def test_a_call_runs_on_the_thread_with_the_time_and_gives_its_result(processes):
    process = processes()
    before = time.monotonic()
    now, name = process.thread.call(lambda now: (now, threading.current_thread().name)).result(10)
    assert before <= now <= time.monotonic()
    assert name == "io-0"
    assert not process.thread.is_current()
    assert process.thread.call(lambda _: process.thread.is_current()).result(10)


def test_the_error_of_a_call_is_its_futures_or_goes_to_a_function_and_the_thread_lives(processes):
    process = processes()
    with pytest.raises(ZeroDivisionError):
        process.thread.call(lambda _: 1 // 0).result(60)
    errors: list[Exception] = []
    process.thread.tell(lambda _: 1 // 0, errors.append)
    assert process.thread.call(lambda _: 5).result(60) == 5
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_what_belongs_at_the_end_of_a_turn_is_called_once_after_all_that_has_come(processes):
    process = processes()
    seen = []

    def end():
        seen.append("end")

    def first(_now):
        for _ in range(2):
            process.thread.at_end_of_turn(end)
            process.thread.post(lambda _: seen.append("call"))

    process.thread.call(first).result(10)
    process.thread.call(lambda _: None).result(10)
    assert seen == ["end", "call", "call"]
    process.thread.at_end_of_turn(end)
    assert seen[-1] == "end", "on another thread it is called at once"


def test_calls_from_many_threads_are_all_made_each_threads_in_its_order(processes):
    process = processes()
    seen = []

    def caller(name):
        for number in range(500):
            process.thread.post(lambda _, number=number: seen.append((name, number)))

    threads = [threading.Thread(target=caller, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.thread.call(lambda _: None).result(10)
    assert len(seen) == 2000
    for name in range(4):
        assert [number for caller, number in seen if caller == name] == list(range(500))


def test_a_call_to_a_sleeping_thread_is_made_at_once(processes):
    process = processes()
    process.thread.call(lambda _: None).result(10)
    took = []
    for _ in range(20):
        time.sleep(0.02)
        began = time.monotonic()
        process.thread.call(lambda _: None).result(10)
        took.append(time.monotonic() - began)
    assert sorted(took)[10] < 0.1  # it sleeps a second at a time


def test_what_is_queued_reaches_the_other_process_before_the_thread_ends(processes):
    here, there = processes(0), processes(1)
    here.connect(1, there.port)
    payload = np.arange(65_536, dtype=np.float32)
    here.do(*[send(number, payload) for number in range(100)])
    here.thread.close(linger_s=20.0)
    wait_until(lambda: len(there.machine.got) == 100)
    assert {data for _, _, data in there.machine.got} == {payload.tobytes()}


def test_closing_does_not_wait_longer_than_it_was_told_to(processes):
    here = processes(0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here.connect(9, silent.getsockname()[1])
        here.do(send(0, to=9))
        began = time.monotonic()
        here.thread.close(linger_s=0.3)
        assert time.monotonic() - began < 5


def test_closing_twice_or_from_several_threads_does_no_harm(processes):
    process = processes()
    threads = [threading.Thread(target=process.thread.close) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    process.thread.close()
    assert not any(thread.name == "io-0" for thread in threading.enumerate())


def test_after_an_orderly_end_of_which_the_machine_is_told_every_call_is_refused(processes):
    process = processes()
    process.close()
    assert isinstance(process.machine.aborted, Closed)
    assert process.thread.error is None
    for use in (process.thread.call, process.thread.post):
        with pytest.raises(Closed, match="has ended"):
            use(lambda _: None)
    process.thread.wake()
    process.thread.unwatch(0)


def test_the_thread_can_be_closed_from_a_call_on_it(processes):
    process = processes()
    process.thread.call(lambda _: process.thread.close()).result(10)
    wait_until(lambda: not any(thread.name == "io-0" for thread in threading.enumerate()))


@pytest.mark.parametrize("where", ["post", "receive", "call instruction"])
def test_an_error_on_the_thread_fails_what_is_outstanding_and_all_later_calls(processes, caplog, where):
    here, there = processes(0), processes(1)
    done = []

    class Waiting(Recorder):
        def abort(self, error, now):
            super().abort(error, now)
            self.instructions.append(Call(function=lambda: done.append(error)))

    process = processes(2, machine=Waiting())
    entered, blocker = threading.Event(), threading.Event()

    def fail():
        entered.set()
        blocker.wait(10)
        raise ZeroDivisionError

    with caplog.at_level(logging.CRITICAL):
        if where == "post":
            process.thread.post(lambda _: fail())
        elif where == "call instruction":
            process.do(Call(function=fail))
        else:
            process.machine.on_receive = lambda _: fail()
            here.connect(2, process.port)
            here.do(send(0, to=2))
        assert entered.wait(20)
        late = [process.thread.call(lambda _: None) for _ in range(3)]
        blocker.set()
        wait_until(lambda: process.thread.error is not None)
        for future in late:
            with pytest.raises(Closed, match="ZeroDivisionError"):
                future.result(10)
        wait_until(lambda: done)
    with pytest.raises(Closed, match="ZeroDivisionError"):
        process.thread.call(lambda _: None)
    assert isinstance(done[0], Closed)
    assert isinstance(process.machine.aborted.__cause__, ZeroDivisionError)
    assert "ZeroDivisionError" in caplog.text
    there.thread.call(lambda _: None).result(10)
    wait_until(lambda: not any(thread.name == "io-2" for thread in threading.enumerate()))


def test_a_descriptor_can_be_watched_from_any_thread(processes):
    process = processes()
    ours, theirs = socket.socketpair()
    heard = threading.Event()

    def read():
        ours.recv(10)
        heard.set()

    process.thread.watch(ours.fileno(), read)
    theirs.send(b"x")
    assert heard.wait(10)
    process.thread.unwatch(ours.fileno())
    heard.clear()
    theirs.send(b"x")
    assert not heard.wait(0.1)
    ours.close()
    theirs.close()


def test_the_switch_interval_is_set_while_any_thread_lives_and_restored_at_the_last_end(processes):
    before = sys.getswitchinterval()
    first = processes(0, switch_interval_s=0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002)
    second = processes(1, switch_interval_s=0.001)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    processes(2)
    second.close()
    assert sys.getswitchinterval() == pytest.approx(0.002)
    first.close()
    assert sys.getswitchinterval() == before


def test_a_busy_main_thread_does_not_stop_the_traffic(processes):
    here, there = processes(0, switch_interval_s=0.0005), processes(1)
    here.connect(1, there.port)
    here.do(*[send(number, bytes(100_000)) for number in range(100)])
    deadline = time.monotonic() + 30
    spins = 0
    while len(there.machine.got) < 100:
        spins += 1  # never waits, never lets the interpreter go
        assert time.monotonic() < deadline
    assert spins > 0


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_stays_behind():
    before = open_descriptors()
    here, there = RealProcess(0), RealProcess(1)
    here.connect(1, there.port)
    here.do(send(0))
    wait_until(lambda: there.machine.got)
    here.do(Disconnect(peer=Peer(1)))
    here.close()
    there.close()
    assert open_descriptors() == before
