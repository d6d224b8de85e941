from __future__ import annotations

import subprocess
import sys
import threading

import zmq

from tests.leaks import Census


def test_nothing_is_reported_if_nothing_is_left():
    before = Census.take()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind("inproc://nothing")
    assert before.leaked_since() == []


def test_a_thread_that_is_left_is_named(monkeypatch):
    monkeypatch.setattr("tests.leaks.GRACE_S", 0.01)
    before = Census.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    try:
        assert before.leaked_since() == ["thread 'forgotten'"]
    finally:
        release.set()
        thread.join()


def test_a_process_that_is_left_is_named_and_ended(monkeypatch):
    monkeypatch.setattr("tests.leaks.GRACE_S", 0.2)
    before = Census.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (leaked,) = before.leaked_since()
        assert f"process {child.pid}" in leaked
        assert child.wait() != 0


def test_a_zeromq_context_that_is_left_is_named_and_ended():
    before = Census.take()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind("tcp://127.0.0.1:*")
    (leaked,) = before.leaked_since()
    assert "ZeroMQ context" in leaked
    assert socket.closed
    assert context.closed
