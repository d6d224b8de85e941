"""Sites: who is where, and who speaks for a site."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.kvstore.calls import Sites
from netstorm.protocol.messages import Member


def members(*sites: str) -> list[Member]:
    return [Member(rank, f"host{rank // 2}", 4000 + rank, site, rank) for rank, site in enumerate(sites)]


def test_ranks_are_grouped_by_site_in_the_order_of_the_lowest():
    sites = Sites.of(members("west", "east", "west", "east", "north"), 3)
    assert sites.names == ("west", "east", "north")
    assert sites.ranks == ((0, 2), (1, 3), (4,))
    assert (sites.name, sites.local, sites.leaders, sites.size) == ("east", (1, 3), (0, 1, 4), 5)
    assert not sites.is_leader
    assert Sites.of(members("west", "east", "west"), 1).is_leader


def test_the_host_stands_for_a_site_without_a_name():
    assert Sites.of(members("", "", "", "x"), 0).ranks == ((0, 1), (2,), (3,))


def test_a_rank_that_is_no_member_is_refused():
    with pytest.raises(UsageError, match="rank 5"):
        Sites.of(members("a", "b"), 5)
