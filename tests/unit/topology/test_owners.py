"""Who owns how much, and over which links owners are reached."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from netstorm.topology.detours import hops_of
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy, owner_weights, paths_from
from netstorm.topology.tree import Tree
from tests.simulated.jobs import random_policy


def chain(*ranks: int) -> Tree:
    parents = [-1] * len(ranks)
    for parent, child in itertools.pairwise(ranks):
        parents[child] = parent
    return Tree.undirected(Rank(ranks[0]), tuple(parents))


def test_roots_own_what_their_trees_carry_in_lowest_terms():
    policy = Policy(version=0, trees=(chain(0, 1, 2), chain(2, 1, 0), chain(0, 2, 1)), weights=(20, 20, 40))
    assert owner_weights(policy) == (3, 0, 1)


def test_the_hub_of_a_star_owns_everything():
    star = Tree.undirected(Rank(1), (1, -1, 1))
    assert owner_weights(Policy(version=0, trees=(star,), weights=(7,))) == (0, 1, 0)


def test_a_path_has_the_fewest_hops():
    policy = Policy(version=0, trees=(chain(0, 1, 2, 3), chain(3, 1, 2, 0)), weights=(1, 1))
    assert paths_from(policy, 0) == ((0,), (0, 1), (0, 2), (0, 1, 3))


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_a_path_leads_from_every_rank_to_every_other_over_pairs_that_trees_use(size, seed):
    policy = random_policy(random.Random(seed), size)
    pairs = set(hops_of(policy.trees))
    for rank in range(size):
        for target, path in enumerate(paths_from(policy, rank)):
            assert (path[0], path[-1]) == (rank, target)
            assert len(set(path)) == len(path)
            assert set(itertools.pairwise(path)) <= pairs
