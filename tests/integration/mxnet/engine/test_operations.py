"""Operations on MXNet's engine: order, overlap, completion, errors, priority."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from netstorm.errors import NetStormError, NodeLost, UsageError, WaitTimeout
from netstorm.frontends.mxnet.arrays import StagingBuffer
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, drain, fail_all, live_count, push_async
from tests.integration.mxnet.script_process import Script

MXNetError = mx.base.MXNetError
Started = Callable[..., Completion]


def array(value: float = 1.0) -> NDArray:
    return mx.nd.ones((3,)) * value


def failed(started: Started, error: BaseException) -> NDArray:
    """An array that an operation has failed to write."""
    out = array()
    started(writes=(out,)).fail(error)
    return out


def test_only_what_depends_on_an_operation_waits_for_its_completion(
    started: Started,
) -> None:
    out = array()
    completion = started(writes=(out,))
    later = out + 1
    assert (array(5) + 1).asnumpy().tolist() == [6, 6, 6]
    assert live_count() == 1
    read: queue.SimpleQueue[list[float]] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: read.put(later.asnumpy().tolist()))
    reader.start()
    with pytest.raises(queue.Empty):
        read.get(timeout=0.2)
    completion.succeed()
    assert read.get(timeout=60) == [2, 2, 2]
    reader.join()
    assert live_count() == 0


def test_an_operation_starts_when_what_it_reads_has_been_computed(started: Started) -> None:
    first = array()
    completion = started(writes=(first,))
    begun: queue.SimpleQueue[Completion] = queue.SimpleQueue()

    def start(second: Completion) -> None:
        begun.put(second)
        second.succeed()

    push_async(start, reads=(first * 2,), writes=(array(),), name="test")
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.2)
    completion.succeed()
    assert begun.get(timeout=60).done


def test_only_the_first_of_several_completions_counts(started: Started) -> None:
    out = array()
    completion = started(writes=(out,))
    done_before = completion.done
    completion.succeed()
    assert (done_before, completion.done) == (False, True)
    completion.fail(NodeLost("too late"))
    completion.succeed()
    assert out.asnumpy().tolist() == [1, 1, 1]


def test_readers_of_one_array_overlap_and_a_writer_waits_for_them(started: Started) -> None:
    shared = array()
    readers = [started(reads=(shared,), writes=(array(),)) for _ in range(3)]
    begun: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    push_async(begun.put, reads=(), writes=(shared,), name="test")
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.2)
    for reader in readers:
        reader.succeed()
    begun.get(timeout=60).succeed()


def test_an_array_given_twice_and_views_of_it_are_listed_once(script: Callable[..., Script]) -> None:
    process = script("""
a = mx.nd.zeros((4, 4))
views = [a, a[1:3], a.reshape((16,)), a.as_np_ndarray(), a.detach()]
started(reads=views, writes=views).succeed()
started(reads=views + views).succeed()
started(writes=views + views).succeed()
mx.nd.waitall()
show("all three ran")
""")
    assert process.end() == 0
    assert (process.output, process.errors) == ("all three ran\n", "")


def test_what_is_no_ndarray_is_refused() -> None:
    before = live_count()
    things: tuple[Any, ...] = (3.5, "weight", None, [1.0])
    for thing in things:
        with pytest.raises(UsageError, match="works on NDArrays, not on"):
            push_async(Completion.succeed, reads=(thing,), writes=(), name="test")
    assert live_count() == before


def test_an_error_comes_out_as_its_own_class_and_as_mxnets(started: Started) -> None:
    out = failed(started, NodeLost("rank 2 (10.0.0.7:9000): last heard of 3 s ago"))
    with pytest.raises(NodeLost) as raised:
        out.asnumpy()
    assert isinstance(raised.value, MXNetError)
    assert isinstance(raised.value, ConnectionError)
    assert str(raised.value) == "rank 2 (10.0.0.7:9000): last heard of 3 s ago"


def test_the_text_of_an_error_survives(started: Started) -> None:
    for text in ("two\nlines: both", "a NUL \0 inside", "Zürich → 北京", "", "NodeLost: twice"):
        out = failed(started, WaitTimeout(text))
        with pytest.raises(WaitTimeout) as raised:
            out.wait_to_read()
        assert str(raised.value) == text.replace("\0", "\\0")


def test_an_error_that_is_not_netstorms_own_is_named_in_one_that_is(started: Started) -> None:
    out = failed(started, ZeroDivisionError("by nought"))
    with pytest.raises(NetStormError, match="ZeroDivisionError: by nought") as raised:
        out.asnumpy()
    assert isinstance(raised.value, MXNetError)


@pytest.mark.parametrize("dependent", ["copy", "sum", "view", "staged copy"])
def test_an_error_reaches_whatever_depends_on_the_array(dependent: str, started: Started) -> None:
    source, copy = array(), mx.nd.zeros((3,))
    completion = started(writes=(source,))
    buffer = StagingBuffer.like(source)
    buffer.copy_from(source)
    buffer.copy_to(copy)
    every = {"copy": source.copy(), "sum": (source + 1) * 2, "view": source[1:], "staged copy": copy}
    completion.fail(NodeLost("rank 2"))
    with pytest.raises(NodeLost):
        every[dependent].asnumpy()


def test_an_error_reaches_waitall_and_is_raised_once(started: Started) -> None:
    source = array()
    completion = started(writes=(source,))
    copy, total = source.copy(), source + 1
    completion.fail(NodeLost("rank 2"))
    with pytest.raises(NodeLost):
        mx.nd.waitall()
    mx.nd.waitall()
    for silent in (source, copy, total):  # with garbage in the last two: why the store must not go on
        silent.asnumpy()


def test_an_array_can_be_used_again_after_its_error_was_raised(started: Started) -> None:
    out = failed(started, NodeLost("rank 2"))
    with pytest.raises(NodeLost):
        out.wait_to_read()
    out[:] = 4
    started(reads=(out,)).succeed()
    assert (out + 1).asnumpy().tolist() == [5, 5, 5]


def test_an_operation_on_what_could_not_be_computed_is_skipped_and_reports_it(started: Started) -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def push(reads: NDArray, out: NDArray) -> None:
        push_async(
            lambda _: calls.put("started"),
            reads=(reads,),
            writes=(out,),
            name="test",
            skipped=lambda: calls.put("skipped"),
        )

    source, out = array(), array()
    completion = started(writes=(source,))
    push(source * 2, out)
    completion.fail(NodeLost("rank 2"))
    assert calls.get(timeout=60) == "skipped"
    with pytest.raises(NodeLost):
        out.asnumpy()
    broken = mx.nd.random.normal(0, -1, (2,))  # a negative deviation, which MXNet finds when it computes it
    push(broken, out)
    assert calls.get(timeout=60) == "skipped"
    with pytest.raises(MXNetError):
        broken.asnumpy()
    assert drain(60)
    assert (calls.empty(), live_count()) == (True, 0)


def test_an_exception_in_start_fails_the_operation(caplog: pytest.LogCaptureFixture) -> None:
    out = array()

    def start(completion: Completion) -> None:
        raise RuntimeError("cannot begin")

    push_async(start, reads=(), writes=(out,), name="allreduce of w")
    with pytest.raises(NetStormError, match="RuntimeError: cannot begin"):
        out.asnumpy()
    assert "allreduce of w: starting the operation raised" in caplog.text


def test_an_exception_in_skipped_does_no_harm(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    def skipped() -> None:
        raise RuntimeError("cannot even skip")

    push_async(
        lambda completion: completion.succeed(),
        reads=(failed(started, NodeLost("rank 2")),),
        writes=(),
        name="allreduce of w",
        skipped=skipped,
    )
    assert drain(60)
    with pytest.raises(NodeLost):
        mx.nd.waitall()
    assert "allreduce of w: the callback for a skipped operation raised" in caplog.text


def test_fail_all_fails_started_operations_and_those_that_have_yet_to_start(started: Started) -> None:
    shared, out = array(), array()
    started(reads=(shared,), writes=(out,))
    begun: list[Completion] = []
    push_async(begun.append, reads=(), writes=(shared,), name="test")  # waits for its reader
    fail_all(NodeLost("rank 2"))
    for failed_one in (out, shared):
        with pytest.raises(NodeLost):
            failed_one.asnumpy()
    assert drain(60)
    assert (live_count(), begun) == (0, [])
    started(writes=(out,)).succeed()
    assert out.asnumpy().tolist() == [1, 1, 1]


def test_failing_thousands_of_operations_with_dependents_does_not_corrupt_memory(
    script: Callable[..., Script],
) -> None:
    process = script("""
outs = [mx.nd.zeros((3,)) for _ in range(1500)]
copies = [[mx.nd.zeros((3,)) for _ in range(3)] for _ in outs]
for _ in range(5):
    begun = []
    for out, several in zip(outs, copies):
        push_async(begun.append, reads=(), writes=(out,), name="test")
        for copy in several:
            out.copyto(copy)
        push_async(begun.append, reads=(out,), writes=(several[0],), name="test")
    while len(begun) < len(outs):
        time.sleep(0.001)
    engine.fail_all(NodeLost("rank 2"))
    try:
        mx.nd.waitall()
    except NodeLost:
        pass
show("sound")
""")
    assert process.end() == 0, process.errors
    assert "sound" in process.output


def test_ready_operations_start_in_the_order_of_their_priority(script: Callable[..., Script]) -> None:
    process = script("""
os.environ["MXNET_CPU_PRIORITY_NTHREADS"] = "1"  # which the engine reads again when a process is forked
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
order, go, busy = [], threading.Event(), threading.Event()
def block(completion):
    busy.set()
    go.wait()
    completion.succeed()
ready = [mx.nd.zeros((1,)) for _ in range(6)]
mx.nd.waitall()
push_async(block, reads=(), writes=(), name="block")
busy.wait()
for priority, array in zip((0, -3, 5, 1, 5, -8), ready):
    def start(completion, priority=priority):
        order.append(priority)
        completion.succeed()
    push_async(start, reads=(), writes=(array,), name="test", priority=priority)
go.set()
mx.nd.waitall()
show("order", order)
""")
    assert process.end() == 0, process.errors
    assert "order [5, 5, 1, 0, -3, -8]" in process.output
