"""The delay of trees, on the paper's worked example and on trees whose two directions differ."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError
from netstorm.topology import (
    Link,
    Network,
    Node,
    Rank,
    Routing,
    Tree,
    broadcast_delay,
    reduce_delay,
    subtree_delay,
    transfer_delays,
    tree_delay,
)

# arXiv 2404.11352 §III-A: the balanced tree of Fig. 1c. The text gives the delays of the
# four edges to the root by their sums, and for each subtree the largest delay of an edge to a leaf; the
# other leaves are nearer.
PARENTS = {2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, 9: 3, 14: 3, 10: 4, 11: 4, 13: 4, 12: 5}
DELAYS = {
    (2, 1): 48 - 24,
    (3, 1): 35 - 20,
    (4, 1): 41 - 23,
    (5, 1): 57 - 7,
    (6, 2): 24,
    (7, 2): 11,
    (8, 2): 3,
    (9, 3): 20,
    (14, 3): 8,
    (10, 4): 9,
    (11, 4): 23,
    (13, 4): 22,
    (12, 5): 7,
}
# Our ranks begin at 0, the paper's nodes at 1.
PAPER_TREE = Tree.undirected(Rank(0), tuple(PARENTS.get(node, 0) - 1 for node in range(1, 15)))
PAPER_DELAYS = {(child - 1, parent - 1): float(delay) for (child, parent), delay in DELAYS.items()}


@pytest.mark.parametrize(("node", "delay"), [(2, 24), (3, 20), (4, 23), (5, 7), (1, 57), (6, 0)])
def test_the_papers_worked_example(node: int, delay: float):
    assert subtree_delay(PAPER_TREE, PAPER_DELAYS, Rank(node - 1)) == delay


def test_a_whole_trees_reduction_is_that_of_its_root():
    assert reduce_delay(PAPER_TREE, PAPER_DELAYS) == 57


def test_the_way_down_counts_the_other_direction_of_each_edge():
    tree = Tree(root=Rank(0), reduce_parent=(-1, 0, 1), broadcast_parent=(-1, 2, 0))
    delays = {(1, 0): 1.0, (2, 1): 2.0, (0, 2): 10.0, (2, 0): 500.0, (0, 1): 700.0, (1, 2): 900.0}

    with pytest.raises(UsageError, match=r"^the tree has an edge between ranks 1 and 2, which has no delay$"):
        broadcast_delay(tree, {(0, 2): 10.0, (1, 2): 3.0})
    delays[2, 1] = 20.0
    assert reduce_delay(tree, delays) == 21
    assert broadcast_delay(tree, delays) == 30
    assert tree_delay(tree, delays) == 51


def test_a_chunk_takes_its_size_over_the_rate_and_the_latency():
    network = Network(
        nodes=(Node(rank=Rank(0)), Node(rank=Rank(1), egress=1e6), Node(rank=Rank(2))),
        links=(
            Link(source=Rank(0), target=Rank(1), rate=8e6, latency=0.5),
            Link(source=Rank(1), target=Rank(2), rate=4e6, latency=0.25),
        ),
        routing=Routing.UNDERLAY,
    )

    assert transfer_delays(network, 1_000_000) == {
        (0, 1): 1.0 + 0.5,
        (1, 2): 8.0 + 0.25,  # the access cap is below the link's rate
        (0, 2): 2.0 + 0.75,
    }


def test_a_chunk_without_bytes_has_no_delay():
    with pytest.raises(UsageError, match=r"^chunk_bytes is 0: expected at least 1$"):
        transfer_delays(Network.uniform(2), 0)
