"""The thread that ends calls, and the one that ends what its continuations begin."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from netstorm.kvstore.process.runtime import CompletionThread

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
