"""Trees of a policy, contracted to the members of a group."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from netstorm.topology.network import Rank
from netstorm.topology.policy import Plan, Policy
from netstorm.topology.tree import OUTSIDE, MemberTree, Tree


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Return a tree whose two directions may differ."""
    size = draw(st.integers(1, 9))
    root = draw(st.integers(0, size - 1))

    def parents() -> tuple[int, ...]:
        order = [root, *draw(st.permutations([rank for rank in range(size) if rank != root]))]
        found = [-1] * size
        for place, rank in enumerate(order[1:], start=1):
            found[rank] = order[draw(st.integers(0, place - 1))]
        return tuple(found)

    return Tree(root=Rank(root), reduce_parent=parents(), broadcast_parent=parents())


def way_up(parents: tuple[int, ...], rank: int) -> list[int]:
    walk = [rank]
    while parents[walk[-1]] >= 0:
        walk.append(parents[walk[-1]])
        assert len(walk) <= len(parents), "a circle"
    return walk


@given(trees(), st.data())
def test_a_contracted_tree_spans_the_members_and_nobody_else(tree: Tree, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, tree.size - 1), min_size=1)))
    found = MemberTree(tree, members)
    for parents in (found.reduce_parent, found.broadcast_parent):
        for rank in range(tree.size):
            if rank in members:
                walk = way_up(parents, rank)
                assert walk[-1] == found.root
                assert set(walk) <= set(members)
            else:
                assert parents[rank] == OUTSIDE
    everybody = sum(1 << rank for rank in members)
    assert found.subtree_mask[found.root] == found.broadcast_mask[found.root] == everybody


@given(trees(), st.data())
def test_a_members_parent_is_the_nearest_member_above_it(tree: Tree, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, tree.size - 1), min_size=1)))
    found = MemberTree(tree, members)
    for rank in members:
        above = [other for other in way_up(tree.reduce_parent, rank)[1:] if other in members]
        if rank != found.root:
            assert found.reduce_parent[rank] == (above[0] if above else found.root)


@given(trees())
def test_with_all_ranks_as_members_a_tree_is_itself(tree: Tree) -> None:
    found = MemberTree(tree, range(tree.size))
    assert found.root == tree.root
    assert found.reduce_parent == tree.reduce_parent
    assert found.broadcast_parent == tree.broadcast_parent
    assert found.broadcast_mask == tree.broadcast_mask


def test_a_groups_plan_expects_its_members_contributions() -> None:
    chain = Tree.undirected(Rank(0), (-1, 0, 1, 2))
    policy = Policy(version=1, trees=(chain,), weights=(1,))
    plan = Plan(policy, 1, (1, 3))
    assert plan.root == (1,)
    assert plan.everybody == 0b1010
    assert plan.expected == (0b1010,)
    assert plan.reduce_children == ((3,),)
    assert Plan(policy, 3, (1, 3)).reduce_parent == (1,)


@given(trees(), st.data())
def test_a_path_leads_over_members_alone_up_as_sums_go_and_down_as_results_do(
    tree: Tree, data: st.DataObject
) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, tree.size - 1), min_size=1)))
    contracted = MemberTree(tree, members)
    for source in members:
        for target in members:
            path = contracted.path(source, target)
            assert (path[0], path[-1]) == (source, target)
            assert set(path) <= set(members)
            for one, other in pairwise(path):
                assert contracted.reduce_parent[one] == other or contracted.broadcast_parent[other] == one
