"""How many local steps this node takes before each exchange: it measures, reports, and gets the answer."""

from __future__ import annotations

import threading
from typing import Final

from netstorm import clock
from netstorm.errors import UsageError, WaitTimeout
from netstorm.kvstore.membership.local_steps import StepsRequest
from netstorm.kvstore.operations.round_times import RoundTimes
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.messages import StepTimes

__all__ = ["StepPacer"]

_SLICE_S: Final = 0.2
"""Waits are cut into slices, in which the runtime's failure is noticed and Python's signal handlers run."""


class StepPacer:
    """ESync's side of one node, for one training.

    In a round: `steps` says how many steps to take. The program calls `round_ends` when it has asked for the
    last one; the others may be called later, by whoever carries steps and exchange out: `exchange_begins`
    when the steps are done, and `exchange_ends` when the average is here.
    """

    def __init__(self, runtime: Runtime, *, least: int, most: int) -> None:
        """Begin before the first step. The n-th pacer of every process is of the same training.

        Args:
            runtime: of this process.
            least: fewest local steps of a round.
            most: most.

        Raises:
            UsageError: these are no bounds; or the job is reproducible.
        """
        if not 1 <= least <= most:
            raise UsageError(
                f"least_steps={least}, most_steps={most}: expected whole numbers from 1 on, the first one "
                "not above the second"
            )
        runtime.refuse_if_reproducible("ESync")
        self._runtime: Final = runtime
        self._training: Final = runtime.open_namespace()
        self._least, self._most = least, most
        self._times: Final = RoundTimes(clock.monotonic())
        self._lock: Final = threading.Lock()
        self._round = -1
        """The last one whose steps are done."""
        self._steps = least
        """Of the round after that; before the first answer, the fewest."""
        self._taken = least
        """Of the round that has ended last."""
        self._answered = threading.Event()
        self._answered.set()
        self._request: StepsRequest | None = None
        self._error: Exception | None = None

    def steps(self) -> int:
        """Return the number of steps of the present round. Waits for the state server, if it has not
        answered: it does so when all nodes have begun the exchange before.

        Raises:
            WaitTimeout: it has not answered within NETSTORM_WAIT_TIMEOUT.
            NetStormError: the job has failed.
        """
        limit_s = self._runtime.settings.wait_timeout_s
        deadline = clock.monotonic() + limit_s
        while not self._answered.wait(_SLICE_S):
            self._runtime.check()
            if clock.monotonic() > deadline:
                raise WaitTimeout(
                    f"no answer of the state server within {limit_s:g} s (NETSTORM_WAIT_TIMEOUT) to the "
                    f"steps of round {self._round}: a rank has not taken its own"
                )
        if self._error is not None:
            raise self._error
        return self._steps

    def round_ends(self, taken: int) -> None:
        """Have `steps` wait for the answer to the round that ends: `exchange_begins` will report it.

        Args:
            taken: how many steps it has: fewer than `steps` if this node has just joined an elastic job.
        """
        self._taken = taken
        self._answered.clear()

    def exchange_begins(self, round: int) -> None:
        """Record that the steps of a round are done, and report them; from any thread, and does not wait.
        A round that was recorded before is ignored.
        """
        with self._lock:
            if round <= self._round:
                return
            self._round = round
            step_s, exchange_s = self._times.exchange_begins(self._taken, clock.monotonic())
            report = StepTimes(
                training=self._training,
                round=round,
                step_s=step_s,
                exchange_s=exchange_s,
                least=self._least,
                most=self._most,
            )
            request = self._request = StepsRequest(
                report=report, done=lambda error: self._done(request, error)
            )
        self._runtime.post(lambda node, _: node.requests.local_steps.report(request))

    def exchange_ends(self) -> None:
        """Record that an average, or one of its parts, is here; from any thread."""
        with self._lock:
            self._times.exchange_ends(clock.monotonic())

    def _done(self, request: StepsRequest, error: Exception | None) -> None:
        if request is not self._request:
            return  # a later round has been reported since
        if error is None:
            self._steps = request.steps
        self._error = error
        self._answered.set()
