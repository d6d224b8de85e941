"""Trees that somebody wrote down, and what is said about those that are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given

from netstorm.errors import TopologyFileError, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Node, Rank, custom, fapt, form_policy, parse_topology

GOOD = """\
trees:
  - {root: 0, parent: {1: 0, 2: 0, 3: 2}, share: 2.5}
  - root: 1                      # the shape of lines does not matter
    reduce: {0: 2, 2: 1, 3: 1}
    broadcast: {0: 1, 2: 0, 3: 0}
"""


def test_a_topology_file_says_what_its_format_promises():
    forest = parse_topology(GOOD, Network.uniform(4), "mine.yaml")

    first, second = forest.trees
    assert (first.root, first.reduce_parent, first.broadcast_parent) == (0, (-1, 0, 0, 2), (-1, 0, 0, 2))
    assert (second.root, second.reduce_parent, second.broadcast_parent) == (1, (2, -1, 1, 1), (1, -1, 0, 0))
    assert forest.shares == (2.5, 1.0)
    assert forest.reason == "custom: 2 trees of mine.yaml"


@given(networks(symmetric=None, routing=None))
def test_any_policy_can_be_written_down(network: Network):
    trees = fapt(network).trees
    text = yaml.safe_dump(
        {
            "trees": [
                {
                    "root": int(tree.root),
                    "reduce": {rank: up for rank, up in enumerate(tree.reduce_parent) if up >= 0},
                    "broadcast": {rank: up for rank, up in enumerate(tree.broadcast_parent) if up >= 0},
                }
                for tree in trees
            ]
        }
    )

    assert parse_topology(text, network).trees == trees


def test_a_file_is_what_the_scheme_is_formed_from(tmp_path: Path):
    path = tmp_path / "trees.yaml"
    path.write_text(GOOD)

    policy = form_policy(Network.uniform(4), "custom", custom=str(path))

    assert [tree.root for tree in policy.trees] == [0, 1]
    assert policy.weights == (714, 286)


def test_without_a_file_the_setting_is_named():
    with pytest.raises(UsageError, match=r"^topology custom without a file: expected NETSTORM_TOPOLOGY_FILE"):
        form_policy(Network.uniform(2), "custom")


def test_a_file_that_is_not_there_is_said_to_be_so():
    with pytest.raises(TopologyFileError, match=r"^no/such\.yaml: the topology file cannot be read: No such"):
        custom(Network.uniform(2), "no/such.yaml")


def tree(text: str) -> str:
    return f"trees:\n  - {{root: 0, parent: {{1: 0, 2: 0}}}}\n  - {text}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: empty: expected trees: ["),
        ("tree: []", "1: unknown key 'tree' in the file: expected trees; did you mean 'trees'?"),
        ("{}", "1: the file has no trees: expected trees: ["),
        ("trees: []", "1: no trees: expected at least one"),
        ("trees: 3", "1: trees is '3': expected a list of trees"),
        (tree("{parent: {1: 0, 2: 0}}"), "3: tree 2 has no root: expected root: 0"),
        (tree("{root: 3, parent: {}}"), "3: root of tree 2: there is no rank 3: expected 0 to 2"),
        (tree("{root: top, parent: {}}"), "3: root of tree 2: 'top' is not a rank"),
        (tree("{root: 0}"), "3: tree 2 has no parents: expected parent, or reduce and broadcast"),
        (tree("{root: 0, reduce: {1: 0, 2: 0}}"), "3: tree 2 has reduce: expected parent, or reduce and"),
        (
            tree("{root: 0, parent: {1: 0}}"),
            "3: parent of tree 2 has no parent of rank 2: expected one for",
        ),
        (tree("{root: 0, parent: {0: 1, 1: 0, 2: 0}}"), "3: rank 0 is the root: expected no parent of it"),
        (tree("{root: 0, parent: {1: 1, 2: 0}}"), "3: rank 1 is its own parent: expected another rank"),
        (
            tree("{root: 0, parent: {1: 2, 2: 1}}"),
            "3: tree 2: reduce parents of ranks 1, 2 do not lead to the",
        ),
        (tree("{root: 0, parent: {1: 0, 2: 7}}"), "3: parent of 2: there is no rank 7: expected 0 to 2"),
        (tree("{root: 0, parent: {1: 0, 1: 0, 2: 0}}"), "3: '1' is given twice"),
        (tree("{root: 0, parent: {1: 0, 2: 0}, share: 0}"), "3: share of tree 2: '0' is not a share"),
        (tree("{root: 0, parent: {1: 0, 2: 0}, share: .inf}"), "3: share of tree 2: '.inf' is not a share"),
        (
            "trees:\n- root: 1\n  parent:\n    0: 1\n    2: 0\n",
            "5: parent of 2 lets rank 2 send to rank 0, to which it has no link: expected pairs",
        ),
        (
            "trees:\n- root: 1\n  reduce: {0: 1, 2: 1}\n  broadcast:\n    2: 1\n    0: 2\n",
            "6: parent of 0 lets rank 2 send to rank 0, to which it has no link",
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(text: str, message: str):
    links = tuple(
        Link(source=Rank(source), target=Rank(target), rate=1e6)
        for source, target in ((0, 1), (1, 0), (0, 2), (1, 2), (2, 1))
    )
    network = Network(nodes=tuple(Node(rank=Rank(rank)) for rank in range(3)), links=links)
    if text.startswith("trees:\n  - {root: 0, parent: {1: 0, 2: 0}}"):
        network = Network.uniform(3)

    with pytest.raises(TopologyFileError, match="^" + re.escape(f"mine.yaml:{message}")):
        parse_topology(text, network, "mine.yaml")
