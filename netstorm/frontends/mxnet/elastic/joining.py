"""How a newcomer gets the job's state: it asks all ranks, and blocks until it has everything."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from netstorm import clock
from netstorm.checkpoint.format import NumpyTensors, unpack
from netstorm.errors import WaitTimeout
from netstorm.frontends.mxnet.checkpoint import KeptState
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.state_transfer.snapshot import Snapshot

__all__ = ["JobState", "fetch_state"]

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.2
"""Waits are cut into slices, so that Python's signal handlers run."""
_REPORT_S: Final = 10.0
_PROGRESS: Final = "state_bytes_fetched"


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of the job before one of its steps."""

    step: int
    barriers: int
    kept: KeptState
    """Values and states, until the script asks for them."""
    next_rounds: dict[str, int]
    """By key: the first round of the step."""
    helpers: dict[str, int]
    """The same of the keys that checkpoints use."""
    sums: frozenset[int | str]
    """Keys whose values are sums, because the script updates its weights itself."""
    rescale_grad: float | None
    agreed: dict[int | str, Any] = field(default_factory=dict)
    """By key: what codecs have agreed on, as an array."""
    script: dict[str, object] = field(default_factory=dict)
    """By name: what the scripts have attached."""


def fetch_state(runtime: Runtime) -> JobState:
    """Block until this node has the job's state.

    Raises:
        WaitTimeout: nothing has come for too long; names the ranks that have not answered.
        NetStormError: the job has failed.
    """
    _log.warning("rank %d has joined a job that trains already: it fetches the job's state", runtime.rank)
    begun = clock.monotonic()
    found: list[Snapshot] = []
    _wait(runtime, _ask(runtime, found.append))
    snapshot = found[0]
    state = cast("dict[str, Any]", unpack(snapshot.content, NumpyTensors()))
    _log.warning(
        "rank %d has the job's state before step %d: %.1f MB in %.1f s",
        runtime.rank,
        snapshot.step,
        snapshot.nbytes / 1e6,
        clock.monotonic() - begun,
    )
    return JobState(
        step=snapshot.step,
        barriers=snapshot.barriers,
        kept=KeptState(
            state, source="the job's state", token=state["rule"], rounds=state["rounds"], partial=True
        ),
        next_rounds=state["next_rounds"],
        helpers=state["helpers"],
        sums=frozenset(state["sums"]),
        rescale_grad=state["rescale_grad"],
        agreed=state["agreed"],
        script=state["script"],
    )


def _ask(runtime: Runtime, take: Callable[[Snapshot], None]) -> concurrent.futures.Future[None]:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def done(error: Exception | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    runtime.post(lambda node, now: node.requests.fetch_state(take, done, now))
    return future


def _wait(runtime: Runtime, future: concurrent.futures.Future[None]) -> None:
    limit_s = runtime.settings.wait_for_nodes_s
    progress, since = -1.0, clock.monotonic()
    reported = since
    while not concurrent.futures.wait([future], _SLICE_S).done:
        runtime.check()
        now, fetched = clock.monotonic(), runtime.counters.snapshot().get(_PROGRESS, 0)
        if fetched != progress:
            progress, since = fetched, now
        if now - reported >= _REPORT_S:
            reported = now
            _log.warning("still waiting for %s", _waiting_text(runtime))
        if now - since > limit_s:
            raise WaitTimeout(
                f"rank {runtime.rank} has got nothing of the job's state for {limit_s:g} s "
                f"(NETSTORM_WAIT_FOR_NODES): it waits for {_waiting_text(runtime)}"
            )
    future.result()


def _waiting_text(runtime: Runtime) -> str:
    text: concurrent.futures.Future[str] = concurrent.futures.Future()
    runtime.post(lambda node, _: text.set_result(node.requests.live.waiting_text()))
    try:
        return text.result(timeout=1.0) or "the scheduler"
    except concurrent.futures.TimeoutError:
        return "its own I/O thread"
