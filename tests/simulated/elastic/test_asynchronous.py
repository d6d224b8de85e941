"""Asynchronous stores in jobs that nodes leave and join: what is confirmed stays, and counts once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import WaitTimeout
from netstorm.kvstore.asynchronous.blocks import Block, BlockCopies
from netstorm.kvstore.asynchronous.server import Serving
from tests.simulated.elastic import asynchronous_chaos as chaos
from tests.simulated.jobs import examples


@given(st.integers(0, 2**32))
@examples(2)
def test_whatever_happens_pushes_count_once_and_pulls_never_go_back(seed):
    chaos.run(seed, steps=8, faults=3)


def test_owners_and_replicas_change_in_this_job():
    report = chaos.run(2, steps=12, faults=5, kinds=("crash", "join"))
    assert report.views >= 2
    assert report.checked > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(80, id="ranks that are cut off together confirm pushes to each other"),
        pytest.param(122, id="a newcomer's pushes are counted from those of the others in a new block, too"),
        pytest.param(148, id="places that no node has hold up nobody"),
        pytest.param(367, id="all owners count a newcomer's clocks from the same one"),
    ],
)
def test_jobs_that_have_failed_once(seed):
    chaos.run(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_many_random_jobs(first):
    for seed in range(first, first + 10):
        chaos.run(seed)


@pytest.mark.slow
def test_long_random_jobs():
    for seed in range(1000, 1002):
        chaos.run(seed, **chaos.LONG)


def no_copies(patch):
    """Pushes are confirmed before the replica has the state."""
    patch.setattr(Serving, "_lacks", lambda *_: False)


def old_copies(patch):
    """A replica confirms states, and keeps the values of the first one."""
    keep = BlockCopies.keep

    def keep_old(self, place, state):
        known = self.get(place)
        keep(self, place, state if known is None else replace(state, values=known.values))

    patch.setattr(BlockCopies, "keep", keep_old)


def repeated_pushes(patch):
    """An owner forgets which pushes it has."""
    add_part = Block.add_part

    def forgetful(self, rank, push, payload):
        self._arrived[rank] = min(self._arrived[rank], push.number)
        return add_part(self, rank, push, payload)

    patch.setattr(Block, "add_part", forgetful)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "error"),
    [
        (no_copies, "the end of all programs"),  # which end with `NodeLost`
        (old_copies, "own pushes"),
        (repeated_pushes, "own pushes"),
    ],
)
def test_the_checks_see_lost_and_doubled_pushes(mutation, error, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises((AssertionError, WaitTimeout), match=error):
        chaos.run(10, steps=12, faults=5, kinds=("crash", "join"))
