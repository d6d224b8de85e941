"""Jobs that nodes leave and join at random: every result is the exact sum of the contributors it names."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated.elastic import chaos

SEEDS = int(os.environ.get("ELASTIC_SEEDS", "0"))
"""Seeds of the longest test. A failing one is replayed by `python -m tests.simulated.elastic.chaos SEED`."""


@given(st.integers(0, 2**32))
@settings(max_examples=6)
def test_whatever_happens_results_are_exact_equal_and_in_time(seed):
    chaos.run(seed, steps=8, faults=3)


@pytest.mark.parametrize("kind", sorted({*chaos.KINDS}))
def test_each_kind_of_fault_alone(kind):
    assert chaos.run(33, steps=8, faults=3, kinds=(kind,)).happened


def test_views_change_and_some_results_are_of_some_ranks_only_in_these_jobs():
    report = chaos.run(27)
    assert report.views >= 4
    assert 0 < report.partial < report.checked


def test_the_same_seed_is_the_same_job():
    first, second = (chaos.Chaos(5, steps=6, faults=3) for _ in range(2))
    assert first.run() == second.run()
    assert first.cluster.digest() == second.cluster.digest()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(
            224, id="a newcomer's session breaks before it hears that it has joined", marks=pytest.mark.slow
        ),
        pytest.param(567, id="a policy takes over a round of which a newcomer has no binding"),
        pytest.param(669, id="a state has a result that was lost with the rank it came from"),
        pytest.param(782, id="a newcomer gets results of a round that all others have begun"),
        pytest.param(
            855, id="a rank of a group comes back, and is in no group any more", marks=pytest.mark.slow
        ),
    ],
)
def test_long_jobs_that_have_failed_once(seed):
    chaos.run(seed, **chaos.LONG)


def test_who_is_removed_before_it_hears_that_it_has_joined_ends_soon():
    report = chaos.run(78)
    assert report.happened["out: NodeRemoved"] == 1
    assert report.virtual_s < 60, "not after NETSTORM_JOIN_TIMEOUT"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_a_hundred_random_jobs(first):
    for seed in range(first, first + 25):
        chaos.run(seed)


@pytest.mark.slow
@pytest.mark.timeout(36000)
@pytest.mark.skipif(
    not SEEDS, reason="ELASTIC_SEEDS=1000 runs as many jobs of 200 rounds, which takes an hour"
)
def test_many_long_random_jobs():
    for seed in range(1000, 1000 + SEEDS):
        assert chaos.run(seed, **chaos.LONG).rounds >= 200
