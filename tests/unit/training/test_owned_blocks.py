"""Blocks that a rank owns: on which value a gradient counts as computed, and when the rule is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.kvstore.asynchronous.blocks import Owners
from netstorm.training.owned_blocks import OwnedBlocks, initial_blocks
from tests.unit.training.blocks import granted_key


class Rule:
    """Adds gradients, and records the value on which each was computed."""

    fingerprint = "add"
    whole = False
    begins_with_states = False

    def __init__(self, *, compensates=True):
        self.compensates = compensates
        self.bases = []

    def begin(self, block, values, states):
        self.states = states
        return values.copy()

    def update(self, block, values, gradient, live, base):
        self.bases.append(None if base is None else base.tolist())
        values += gradient

    def read(self, values, then):
        then(values.copy())

    def encoded_state(self, block, values):
        return b"s"

    def problem_of(self, block, initial, states):
        return "" if states == b"s" else f"{states!r}: expected b's'"

    def drop(self, block):
        self.dropped = block


class Thread:
    """Calls what it was given when it is told to."""

    def __init__(self):
        self.calls = []

    def call(self, function):
        self.calls.append(function)

    def post(self, function):
        function()

    def run(self):
        while self.calls:
            self.calls.pop(0)()


class Job:
    def __init__(self, *, elastic=False, compensates=True):
        self.key, self.rule, self.thread = granted_key(), Rule(compensates=compensates), Thread()
        initial = {block: np.full(4, float(block), np.float32) for block in range(2)}
        self.blocks = OwnedBlocks(self.key, self.rule, self.thread, initial, elastic=elastic)

    def push(self, rank, block=1):
        self.blocks.apply(block, rank, np.ones(4, np.float32), (), lambda _: None)

    def pull(self, rank, block=1):
        found: list[Any] = []
        self.blocks.read(block, found.append)
        self.thread.run()
        self.blocks.pulled(block, rank, found[0])
        return found[0].tolist()

    @property
    def bases(self):
        self.thread.run()
        return [None if base is None else base[0] for base in self.rule.bases]


def test_a_gradient_was_computed_on_what_its_rank_has_pulled_else_on_the_initial_value():
    job = Job()
    job.push(0)
    assert job.pull(0) == [2.0] * 4
    job.push(1)
    job.push(0)
    job.pull(1)
    job.push(1)
    assert job.bases == [1.0, 1.0, 2.0, 4.0]


def test_a_value_that_is_read_with_an_update_has_that_update_and_no_later_one():
    job = Job()
    found: list[Any] = []
    job.blocks.apply(1, 0, np.ones(4, np.float32), (), found.append, reads=True)
    job.push(0)
    job.thread.run()
    assert [value.tolist() for value in found] == [[2.0] * 4]


def test_a_rule_that_does_not_compensate_hears_no_base():
    job = Job(compensates=False)
    job.pull(0)
    job.push(0)
    assert job.bases == [None]


def test_what_a_rank_pulls_after_its_push_is_not_what_the_push_was_computed_on():
    job = Job()
    job.push(0)
    job.blocks.pulled(1, 0, np.full(4, 9.0, np.float32))
    assert job.bases == [1.0]


def test_a_read_has_all_updates_before_it_and_none_after():
    job = Job()
    found: list[Any] = []
    job.push(0)
    job.blocks.read(1, found.append)
    job.push(0)
    job.thread.run()
    assert found[0].tolist() == [2.0] * 4


def test_of_a_block_that_another_owner_had_nothing_is_known_of_earlier_pulls():
    job = Job(elastic=True)
    job.blocks.pulled(1, 0, np.full(4, 9.0, np.float32))
    job.blocks.install(1, np.full(4, 5.0, np.float32), b"s")
    job.push(0)
    assert job.bases == [None]
    assert job.rule.states == b"s"
    assert job.pull(2) == [6.0] * 4


def test_a_block_that_is_installed_without_values_has_the_initial_ones():
    job = Job(elastic=True)
    job.blocks.install(1, None, b"")
    job.push(0)
    assert job.bases == [1.0]
    job.blocks.discard(1)
    job.blocks.install(1, np.full(4, 5.0, np.float32), b"s")
    job.push(0)
    assert job.bases == [1.0, None]
    assert job.rule.dropped == 1


def test_an_elastic_job_begins_without_blocks_and_a_block_that_is_not_held_cannot_be_read():
    job = Job(elastic=True)
    job.blocks.read(1, lambda _: None)
    with pytest.raises(KeyError):
        job.thread.run()


def test_states_come_after_updates_and_others_are_refused():
    job = Job(elastic=True)
    found: list[Any] = []
    problems: list[str] = []
    job.blocks.install(1, None, b"")
    job.blocks.states(1, found.append)
    job.blocks.check(1, b"x", problems.append)
    job.blocks.check(1, b"s", problems.append)
    assert not found
    job.thread.run()
    assert found == [b"s"]
    assert problems == ["b'x': expected b's'", ""]


@pytest.mark.parametrize(("elastic", "held"), [(False, [1]), (True, [0, 1, 2])])
def test_a_rank_copies_its_own_blocks_and_in_an_elastic_job_all(elastic, held):
    key, owners, value = granted_key(), Owners([1, 1, 1]), np.arange(10, dtype=np.float32)
    rank = owners.owner(key, 1)
    blocks = initial_blocks(key, value, owners, rank=rank, whole=False, elastic=elastic)
    value[:] = -1
    assert sorted(blocks) == held
    assert blocks[1].tolist() == [4, 5, 6, 7]
