"""Whole jobs in which hardly anything may wait at a node: nothing is lost, comes twice, or waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netstorm.kvstore import node as lifecycle
from netstorm.lab.testing.faults import Corrupt
from netstorm.lab.testing.strategies import fault_plans
from netstorm.pslite.machine import WaitingBytes
from tests.simulated.elastic import asynchronous_chaos, chaos
from tests.simulated.jobs import jobs
from tests.simulated.sums import test_asynchronous as asynchronous

refusals: list[object] = []


class Recording(WaitingBytes):
    """Records what had no room."""

    __slots__ = ()

    def take(self, *arguments):
        try:
            return super().take(*arguments)
        except Exception as error:
            refusals.append(error)
            raise


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let one message of each peer wait, and no second one."""
    monkeypatch.setattr(lifecycle, "WaitingBytes", partial(Recording, of_one=1))
    refusals.clear()
    yield
    assert refusals, "this test does not test anything"


common = partial(settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@common(max_examples=8)
@given(st.data(), jobs(nodes=(2, 6), policies=(1, 3), detours=True))
def test_sums_are_right(data, job):
    plan = data.draw(fault_plans(job.nodes, duration_s=max(0.05, job.spread_s), longest_cut_s=4.0))
    cluster = job.cluster(faults=[*plan, Corrupt(probability=0.01)]).join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)
    job.check(pending)
    cluster.finish()


@common(max_examples=6)
@given(asynchronous.trainings)
def test_pushes_are_applied_once(training):
    training = replace(training, breaks=0.02)
    asynchronous.check_total(training, asynchronous.run(training))


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_views_change(seed):
    chaos.run(seed, steps=8, faults=3)
    asynchronous_chaos.run(seed, steps=8, faults=3)
