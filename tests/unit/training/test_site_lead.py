"""Who leads a site, as the results of its sums and copies say who is left."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from netstorm.errors import NodeLost
from netstorm.kvstore.calls import Sites
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Done, Operation
from netstorm.training.sites import SiteLead, SiteTensor

VALUES = [np.zeros(3, np.float32)]
TENSORS = [SiteTensor("w", 3, np.dtype("float32"))]


def lead_of(rank: int) -> tuple[SiteLead, list[Operation]]:
    """Return the lead of a rank's site, and the operations that it begins."""
    submitted: list[Operation] = []
    sites = Sites(names=("a", "b"), ranks=((0, 1, 2), (3,)), mine=int(rank == 3), rank=rank)
    register = functools.partial(Key, 0)
    return SiteLead(TENSORS, sites, register=register, submit=submitted.append, elastic=True), submitted


class Site:
    """The site of ranks 0, 1 and 2 as one of them sees it; its operations end when a test says so."""

    def __init__(self, rank: int) -> None:
        self.lead, self.submitted = lead_of(rank)
        self.ends: list[Exception | None] = []
        self.pulls: list[Done] = []

    def sum(self) -> None:
        """Begin a sum."""
        self.lead.sum(VALUES, "gradients of w", 0, self.ends.append)

    def share(self) -> None:
        """Begin to pull, and to share what was pulled."""
        self.lead.share(VALUES, "w", 0, self.pulls.append, self.ends.append)

    def end(self, *contributors: int) -> None:
        """End the last operation, whose chunks are of these bit sets of ranks."""
        operation = self.submitted[-1]
        for chunk, bits in enumerate(contributors):
            operation.record_result(chunk, bits)
        operation.done(None)

    def gives(self) -> bool:
        """Return whether the last operation gives this rank's values."""
        source = self.submitted[-1].source
        assert isinstance(source, tuple)
        return source[0] is not None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_lowest_rank_pulls_and_gives_the_others_its_values(rank: int) -> None:
    site = Site(rank)
    site.share()
    assert len(site.pulls) == site.lead.leads == (rank == 0)
    for done in site.pulls:
        done(None)
    assert site.gives() == (rank == 0)
    site.end(0b111)
    assert site.ends == [None]


def test_a_rank_leads_once_a_sum_has_come_without_the_lower_ones() -> None:
    site = Site(1)
    site.sum()
    site.end(0b111, 0b110)  # rank 0 has died between two chunks
    site.end(0b110)
    assert site.ends == [None]
    assert site.lead.leads
    assert site.lead.ranks == (1, 2)


def test_a_sum_is_done_once_all_have_it_and_who_leads_is_what_it_says() -> None:
    """Else a leader could push a sum that nobody else has, and the next one the same gradients again."""
    leader, other = Site(0), Site(1)
    for site in (leader, other):
        site.sum()
        site.end(0b111)
        assert site.ends == []
    assert leader.submitted[-1].key.name == other.submitted[-1].key.name
    leader.end(0b111)
    other.end(0b110)  # rank 0 has died, and may have pushed
    assert leader.ends == other.ends == [None]
    assert not other.lead.leads


def test_if_the_leader_dies_before_all_have_its_values_the_next_one_pulls() -> None:
    site = Site(1)
    site.share()
    site.end(0b111, 0b110)
    assert site.ends == []
    site.pulls[0](None)
    assert len(site.submitted) == 2
    assert site.gives()
    site.end(0b110)
    assert site.ends == [None]


def test_if_the_next_leader_dies_too_the_last_one_pulls() -> None:
    site = Site(2)
    site.share()
    site.end(0b110)
    assert site.pulls == []
    site.end(0b100)
    site.pulls[0](None)
    site.end(0b100)
    assert site.ends == [None]
    assert len(site.submitted) == 3


def test_all_ranks_number_operations_alike_whoever_leads() -> None:
    numbers = []
    for rank in (1, 2):
        site = Site(rank)
        site.sum()
        site.end(0b111)
        site.end(0b111)
        site.share()
        site.end(0b110)
        for done in site.pulls:
            done(None)
        site.end(0b110)
        site.sum()
        numbers.append([(one.key.name, one.round, str(one)) for one in site.submitted])
    assert numbers[0] == numbers[1]
    assert [round for _, round, _ in numbers[0]] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("begin", [Site.sum, Site.share])
def test_an_error_ends_what_was_begun(begin: Callable[[Site], None]) -> None:
    site = Site(1)
    begin(site)
    error = NodeLost("gone")
    site.submitted[-1].done(error)
    assert site.ends == [error]
    assert site.lead.ranks == (0, 1, 2)


def test_a_rank_that_is_alone_leads_and_shares_with_nobody() -> None:
    lead, submitted = lead_of(3)
    ends: list[Exception | None] = []
    pulls: list[Done] = []
    lead.sum(VALUES, "gradients of w", 0, ends.append)
    lead.share(VALUES, "w", 0, pulls.append, ends.append)
    pulls[0](None)
    assert lead.leads
    assert ends == [None, None]
    assert submitted == []
