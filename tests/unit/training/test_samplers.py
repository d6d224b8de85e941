"""Shares of samples among ranks that come and go."""

from __future__ import annotations

import importlib
from itertools import chain

import pytest

from netstorm.errors import UsageError
from netstorm.training.samplers import SampleShares


def samplers(ranks: tuple[int, ...], length: int, batch_size: int, **options: bool) -> list[SampleShares]:
    found = [SampleShares(length, batch_size, seed=3, **options) for _ in ranks]
    share(found, ranks, ranks)
    return found


def share(found: list[SampleShares], ranks: tuple[int, ...], among: tuple[int, ...]) -> None:
    for rank, sampler in zip(ranks, found, strict=True):
        sampler.set_ranks(rank, among)


def test_an_epoch_gives_each_sample_to_one_rank_once() -> None:
    found = samplers((1, 4, 6), 60, 5)
    taken = [sampler.take() for _ in range(4) for sampler in found]
    assert sorted(chain(*taken)) == list(range(60))
    assert taken[0] != sorted(taken[0])
    assert {sampler.epoch for sampler in found} == {0}
    assert sorted(chain(*(sampler.take() for sampler in found))) != sorted(chain(*taken[:3]))
    assert {sampler.epoch for sampler in found} == {1}


def test_no_sample_is_given_twice_when_ranks_leave_and_join() -> None:
    found = samplers((0, 1, 2), 100, 4)
    taken = [sampler.take() for sampler in found]
    share(found, (0, 1, 2), (0, 2))
    taken += [found[0].take(), found[2].take()]
    newcomer = SampleShares(100, 4, seed=3)
    newcomer.load_state_dict(found[0].state_dict())
    share([found[0], found[2], newcomer], (0, 2, 7), (0, 2, 7))
    taken += [sampler.take() for sampler in (found[0], found[2], newcomer)]
    samples = list(chain(*taken))
    assert len(set(samples)) == len(samples) == 32
    assert found[0].state_dict() == newcomer.state_dict()


def test_a_rank_that_has_no_share_yet_moves_on_as_the_others_do() -> None:
    found = samplers((0, 1), 40, 5)
    newcomer = SampleShares(40, 5, seed=3)
    newcomer.set_ranks(3, (0, 1))
    assert newcomer.take() == [sampler.take() for sampler in found][1]
    assert newcomer.state_dict() == found[0].state_dict()


def test_a_rank_that_catches_up_gets_small_batches_and_moves_on_as_the_others_do() -> None:
    found = samplers((0, 1), 40, 5)
    newcomer = SampleShares(40, 5, seed=3)
    newcomer.set_ranks(3, (0, 1), counts=False)
    assert newcomer.take() == [sampler.take() for sampler in found][1][:2]
    newcomer.set_ranks(3, (0, 1), counts=True)
    assert newcomer.take() == [sampler.take() for sampler in found][1]
    assert newcomer.state_dict() == found[0].state_dict()


def test_a_rank_that_skips_steps_leaves_out_what_the_others_take() -> None:
    found = samplers((0, 1), 40, 5)
    newcomer = SampleShares(40, 5, seed=3)
    newcomer.set_ranks(3, (0, 1))
    newcomer.take()
    newcomer.skip(5)
    for sampler in found:
        for _ in range(6):
            sampler.take()
    right = {"epoch": 1, "position": 20, "length": 40, "last": 10}
    assert newcomer.state_dict() == found[0].state_dict() == right


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_who_gives_back_gets_the_same_batches_again(steps: int) -> None:
    first, second = samplers((0, 1), 40, 5)
    taken = [(first.take(), second.take()) for _ in range(steps)]  # the fifth begins an epoch
    newcomer = SampleShares(40, 5, seed=3)
    newcomer.load_state_dict(first.state_dict())
    newcomer.set_ranks(1, (0, 1))
    newcomer.give_back()
    newcomer.give_back()  # once
    assert newcomer.take() == taken[-1][1]
    assert newcomer.state_dict() == first.state_dict()


def test_fewer_samples_than_the_ranks_take_together_are_given_again() -> None:
    (sampler,) = samplers((0,), 3, 5, shuffle=False)
    assert sampler.take() == [0, 1, 2, 0, 1]
    assert sampler.take() == [0, 1, 2, 0, 1]
    assert sampler.epoch == 1


def test_it_is_a_batch_sampler_without_end() -> None:
    (sampler,) = samplers((0,), 4, 2, shuffle=False)
    batches = iter(sampler)
    assert [next(batches) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_a_position_among_other_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="among 5 samples, and this sampler has 4"):
        SampleShares(4, 1).load_state_dict(SampleShares(5, 1).state_dict())
    with pytest.raises(UsageError, match="at least one sample"):
        SampleShares(0, 1)


def test_pytorchs_sampler_keeps_to_pytorchs_permutations_which_earlier_jobs_had() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    elastic = importlib.import_module("netstorm.frontends.torch.elastic")
    expected = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    assert elastic.ElasticSampler(40, 5, seed=3).take() == expected[:5]
