"""AsynchronousSGD in elastic jobs: owners of parameters are killed, and ranks join."""

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
    from tests.integration.torch.programs import elastic_asynchronous

Started = Callable[..., ElasticRanks]


@pytest.fixture
def job(forker: Any, tmp_path: Path) -> Iterator[Started]:
    """A job that a test may start."""
    with ExitStack() as stack:

        def start(begin: int, bounds: str, **settings: object) -> ElasticRanks:
            return stack.enter_context(
                ElasticRanks(forker, tmp_path, begin=begin, elastic=bounds, **settings)
            )

        yield start


def confirmed(said: str) -> int:
    """Return how many steps of a process were confirmed, by its own words."""
    lines = [line for line in said.splitlines() if line.startswith("confirmed ")]
    return int(lines[-1].split()[1])


@pytest.mark.parametrize("staleness", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_every_confirmed_push_counts_once_after_owners_were_killed_and_one_has_joined(
    job: Started, staleness: int
) -> None:
    ranks = job(3, "1:4", CHUNK_SIZE=5000, NETSTORM_STALENESS=staleness)
    for rank in range(3):
        ranks.start(f"first {rank}", rank, elastic_asynchronous.counts, number=rank)
    ranks.wait_until_said("first 0", "confirmed 5\n")
    ranks.kill("first 0")
    killed = {0: confirmed(ranks.said("first 0"))}
    ranks.wait_until_said("first 1", "with ranks (1, 2)")
    ranks.start("back", 0, elastic_asynchronous.counts, number=3)
    ranks.wait_until_said("back", "confirmed 5\n")
    ranks.kill("first 1")
    killed[1] = confirmed(ranks.said("first 1"))
    ranks.wait_until_said("back", "with ranks (0, 2)")
    (ranks.folder / "end").touch()
    for number in (2, 3):
        ranks.wait_until_there(f"ended {number}")
    (ranks.folder / "all ended").touch()
    answers = [ranks.answer("first 2"), ranks.answer("back")]
    ranks.end()
    steps = {2: answers[0]["steps"], 3: answers[1]["steps"]}
    for answer in answers:
        for values in (answer["least"], answer["most"]):
            for number, found in enumerate(values):
                if number in killed:
                    assert found in (killed[number], killed[number] + 1), (number, answers, killed)
                else:
                    assert found == steps.get(number, 0), (number, answers, killed)
    assert answers[1]["at_first"][0] >= killed[0]
    assert answers[1]["at_first"][4] == 0
    assert "does not have its state yet" in answers[1]["early"]


def test_a_momentum_goes_on_at_new_owners_as_if_nothing_had_happened(job: Started) -> None:
    ranks = job(3, "1:4", CHUNK_SIZE=500)

    def until(steps: int, others: int = 0) -> None:
        new = ranks.folder / "new"
        new.write_text(f"{steps} {others}")
        new.replace(ranks.folder / "steps")
        if steps:
            ranks.wait_until_said("first 1", f"step {steps}\n")

    until(0)
    for rank in range(3):
        ranks.start(f"first {rank}", rank, elastic_asynchronous.alone, number=rank)
    for rank in (0, 2):
        ranks.wait_until_said(f"first {rank}", "with ranks (0, 1, 2)")
    until(4)
    ranks.kill("first 0")
    until(7)
    ranks.start("back", 0, elastic_asynchronous.alone, number=3)
    ranks.wait_until_said("back", "with ranks (0, 1, 2)")
    until(9, others=1)
    ranks.kill("first 2")
    until(12, others=1)
    (ranks.folder / "end").touch()
    answers = [ranks.answer("first 1"), ranks.answer("back")]
    ranks.end()
    assert answers[0]["worst"] < 1e-5
