"""Elastic jobs of PyTorch: ranks are killed, come back and join while the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch.elastic_ranks import ElasticRanks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import elastic

Started = Callable[..., ElasticRanks]


@pytest.fixture
def job(forker: Any, tmp_path: Path) -> Iterator[Started]:
    """A job that a test may start."""
    with ExitStack() as stack:

        def start(begin: int, bounds: str, folder: Path = tmp_path, **settings: object) -> ElasticRanks:
            return stack.enter_context(ElasticRanks(forker, folder, begin=begin, elastic=bounds, **settings))

        yield start


def test_a_rank_is_killed_and_two_join_and_all_end_with_the_same_bits(job: Started) -> None:
    ranks = job(2, "1:3")
    for rank in range(2):
        ranks.start(f"first {rank}", rank, elastic.train)
    ranks.wait_until_said("first 0", "step 3 ")
    ranks.kill("first 1")
    ranks.wait_until_said("first 0", "of [0]")
    ranks.start("back", 1, elastic.train)
    ranks.wait_until_said("back", "rank 1 goes on")  # or the next would get its place
    ranks.start("new", -1, elastic.train)
    ranks.wait_until_said("new", "of [0, 1, 2]")
    ranks.wait_until_said("back", "of [0, 1, 2]")
    (ranks.folder / "end").touch()
    first, *others = [ranks.answer(name) for name in ("first 0", "back", "new")]
    ranks.end()
    assert not first.pop("newcomer")
    first.pop("early")
    for other in others:
        assert other.pop("newcomer")
        assert "does not have its state yet" in other.pop("early")
        assert other == first


@pytest.mark.slow
def test_every_call_with_ranks_that_are_not_there_has_a_result_or_an_error_that_names_them(
    job: Started,
) -> None:
    ranks = job(3, "2:4")
    for rank in range(3):
        ranks.start(str(rank), rank, elastic.calls)
    ranks.wait_until_said("2", "running")
    ranks.wait_until_said("0", "running")
    ranks.wait_until_said("1", "running")
    ranks.kill("2")
    zero, one = ranks.answer("0"), ranks.answer("1")
    ranks.end()
    for found in (zero, one):
        assert found["all_reduce SUM"] == [3.0, 3.0]
        assert found["all_reduce AVG"] == [1.5, 1.5]
        assert found["all_reduce MIN"] == [1.0, 1.0]
        assert found["all_reduce MAX"] == [2.0, 2.0]
        assert found["all_reduce PRODUCT"] == [2.0, 2.0]
        assert found["contributors"] == [0, 1]
        assert found["barrier"] == found["monitored_barrier"] == ""
        assert found["broadcast from 0"] == [1.0, 1.0]
        assert found["all_gather"] == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
        assert found["pair"] == [3.0, 3.0]
        for name in ("broadcast from 2", "scatter from 2"):
            assert found[name].startswith("NodeLost: "), found[name]
            assert "rank 2 is not in the job" in found[name]
        for dead in (2, 3):
            for name in (f"send to {dead}", f"recv from {dead}"):
                assert found[name].startswith("NodeLost: "), (name, found[name])
                assert f"rank {dead} " in found[name]
        assert found["all_to_all"].startswith("NodeLost: rank 2 "), found["all_to_all"]
        assert found["all_to_all got"] == [[1.0, 1.0], [2.0, 2.0]]
        assert found["gather to 2"] == []
    assert (zero["reduce to 0"], one["reduce to 0"]) == ([3.0, 3.0], [2.0, 2.0])
    assert (zero["reduce to 2"], one["reduce to 2"]) == ([1.0, 1.0], [2.0, 2.0])
    assert (zero["reduce_scatter"], one["reduce_scatter"]) == ([0.0], [2.0])
    assert (zero["scatter from 0"], one["scatter from 0"]) == ([0.0], [1.0])
    assert zero["gather to 0"] == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert one["source"] == 0
    assert one["with_dead"] == [2.0, 2.0]
