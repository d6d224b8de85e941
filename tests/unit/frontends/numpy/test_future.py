from __future__ import annotations

import asyncio

import pytest

from netstorm.errors import NodeLost, WaitTimeout
from netstorm.frontends.numpy.future import GroupFuture


class Fixture:
    def __init__(self, timeout_s: float = 60.0) -> None:
        self.delivered = 0
        self.failed: list[str] = []
        self.future: GroupFuture[str] = GroupFuture(
            "allreduce(sum) of float32 (3,)",
            timeout_s=timeout_s,
            deliver=self.deliver,
            waiting_for=lambda: "rank 1",
            timed_out=self.failed.append,
        )

    def deliver(self) -> str:
        self.delivered += 1
        return "result"


def test_a_result_is_delivered_once_and_names_who_is_in_it():
    made = Fixture()
    assert not made.future.done()
    assert made.future.contributors is None
    assert repr(made.future) == "<GroupFuture allreduce(sum) of float32 (3,): under way>"
    made.future.finish(None, frozenset({0, 2}))
    assert made.future.done()
    assert made.future.result() is made.future.result(timeout=0)
    assert (made.delivered, made.future.contributors) == (1, {0, 2})


def test_whoever_stops_waiting_hears_who_is_missing_and_the_call_goes_on():
    made = Fixture()
    with pytest.raises(WaitTimeout) as raised:
        made.future.result(timeout=0.001)
    assert str(raised.value) == (
        "allreduce(sum) of float32 (3,) has not ended within 0.001 s: it waits for rank 1"
    )
    assert made.failed == []
    made.future.finish(None, frozenset())
    assert made.future.result() == "result"


def test_a_call_that_reaches_its_own_time_out_fails_the_job(monkeypatch):
    monkeypatch.setattr("netstorm.frontends.numpy.future._GRACE_S", 0.0)
    made = Fixture(timeout_s=0.01)
    with pytest.raises(WaitTimeout, match=r"within 0.01 s: it waits for rank 1$"):
        made.future.result()
    assert len(made.failed) == 1


def test_each_waiter_gets_an_error_of_its_own():
    made = Fixture()
    made.future.finish(NodeLost("rank 1 is gone"))
    errors = []
    for _ in range(2):
        with pytest.raises(NodeLost, match="rank 1 is gone") as raised:
            made.future.result()
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert (made.delivered, made.future.contributors) == (0, None)
    assert "failed" in repr(made.future)


def test_coroutines_await_results_and_errors_and_may_be_cancelled():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        made = Fixture()
        loop.call_soon(made.future.finish, None, frozenset({0}))
        assert await made.future == "result"
        assert await made.future == "result"

        lost = Fixture()
        loop.call_soon(lost.future.finish, NodeLost("gone"))
        with pytest.raises(NodeLost):
            await lost.future

        slow = Fixture()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_wait(slow.future), 0.001)
        slow.future.finish(None, frozenset({0}))  # the call has not been cancelled
        assert await slow.future == "result"

    async def _wait(future: GroupFuture[str]) -> str:
        return await future

    asyncio.run(main())
