from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.lab.testing.faults import Breaks, Corrupt, Crash, Cut, Delay, Partition, Reset, random_plan
from netstorm.lab.testing.strategies import fault_plans


class Recorder:
    """A cluster that only writes down what is done to it, and when."""

    def __init__(self):
        self.planned = []
        self.done = set()

    def at(self, time, action):
        self.planned.append((time, action))

    def run(self, *faults):
        for fault in faults:
            fault.schedule(self)
        for time, action in self.planned:
            self.time = time
            action()
        return self.done

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: self.done.add((self.time, name, *args, *sorted(options.items())))


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (Reset(at=1, source=0, target=-1), {(1, "reset", 0, -1)}),
        (Cut(at=1, source=0, target=2), {(1, "cut", 0, 2, ("one_way", False))}),
        (
            Cut(at=1, source=0, target=2, heal_at=3, one_way=True),
            {(1, "cut", 0, 2, ("one_way", True)), (3, "heal", 0, 2)},
        ),
        (Crash(at=2, rank=1, silent=True), {(2, "crash", 1, ("silent", True))}),
        (
            Corrupt(probability=0.1, until=5),
            {(0, "set_corruption", 0.1), (5, "set_corruption", 0.0)},
        ),
        (Breaks(probability=0.1, at=1, until=5), {(1, "set_breaks", 0.1), (5, "set_breaks", 0.0)}),
        (
            Delay(at=1, source=0, target=1, seconds=0.5, until=2),
            {(1, "delay", 0, 1, 0.5), (2, "delay", 0, 1, 0.0)},
        ),
    ],
)
def test_each_fault_does_what_it_says_when_it_says(fault, done):
    assert Recorder().run(fault) == done


def test_a_partition_cuts_all_pairs_of_different_groups_and_no_others():
    cut = {
        entry[2:4]
        for entry in Recorder().run(Partition(at=1, groups=((0, 1), (2,), (-1,)), heal_at=2))
        if entry[1] == "cut"
    }
    assert cut == {(0, 2), (1, 2), (0, -1), (1, -1), (2, -1)}


@given(st.integers(1, 9), st.integers())
def test_a_random_plan_comes_from_its_seed_and_heals_everything(nodes, seed):
    plan = random_plan(nodes, seed, faults=6, longest_cut_s=5.0)
    assert plan == random_plan(nodes, seed, faults=6, longest_cut_s=5.0)
    done = Recorder().run(*plan)
    assert not any(entry[1] == "crash" for entry in done)
    for time, _, source, target, *_ in (entry for entry in done if entry[1] == "cut"):
        heals = [entry[0] for entry in done if entry[1:] == ("heal", source, target)]
        assert any(time <= healed <= time + 5.0 for healed in heals)


@given(st.data())
def test_generated_plans_name_only_processes_that_exist(data):
    plan = data.draw(fault_plans(3, most=4))
    assert len(plan) <= 4
    for _, name, *args in Recorder().run(*plan):
        if name in {"cut", "heal", "reset", "delay"}:
            assert {-1, 0, 1, 2} >= set(args[:2])
            assert args[0] != args[1]
