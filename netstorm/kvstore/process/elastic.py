"""The state of an elastic job, as frontends give it to ranks that join later, or get it.

A newcomer fetches the state of one step; the others offer theirs before a step. See `state_transfer`.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from typing import Final

from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.state_transfer.snapshot import Snapshot
from netstorm.protocol.frames import Buffer, checksum

__all__ = ["JobState"]

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""


class JobState:
    """The state of a job, at one of its nodes."""

    def __init__(self, runtime: Runtime) -> None:
        """Exchange the state by this node."""
        self._runtime: Final = runtime

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave the job and join it."""
        return self._runtime.node.requests.live.is_elastic

    @property
    def is_needed(self) -> bool:
        """Whether this node has joined a job that had begun, and does not have its state yet."""
        return self._runtime.node.requests.needs_state

    @property
    def requests(self) -> frozenset[int]:
        """Numbers of the requests for this rank's state that ranks wait for. It costs nothing to ask."""
        return self._runtime.node.requests.live.state_requests

    @property
    def contributes(self) -> bool:
        """Whether this node's values are in the sums of rounds that begin now. A newcomer's are not, until it
        has caught up.
        """
        return self._runtime.rank in self._runtime.node.requests.live.contributors

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job, as this node has last heard, ascending."""
        return self._runtime.node.requests.live.ranks

    def offer(
        self, step: int, content: Buffer, rounds: Mapping[int, int], requests: frozenset[int] | None
    ) -> None:
        """Offer this rank's state.

        Args:
            step: of the program; ranks that offer the same step offer the same bytes.
            content: the state; it must not change any more.
            rounds: by key, the first round of the step.
            requests: those that there were before the state was made; it answers them alone. None: the
                program has ended, and it answers all, also those of ranks that come later.
        """
        snapshot = Snapshot(
            step=step, content=content, crc=checksum(content), rounds=dict(rounds), requests=requests
        )
        self._runtime.post(lambda node, now: node.requests.offer_state(snapshot, now))

    def fetch(self) -> Snapshot:
        """Wait for the state of a step, and return it.

        Raises:
            NetStormError: the job has failed.
        """
        self._runtime.check()
        found: list[Snapshot] = []
        requests = self._runtime.node.requests
        future = self._runtime.process.driver.ask(
            lambda done, now: requests.fetch_state(found.append, done, now)
        )
        while not concurrent.futures.wait([future], _SLICE_S).done:
            pass
        future.result()
        return found[0]
