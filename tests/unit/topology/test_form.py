"""One door to all schemes, and what is true of the policies of all."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from netstorm.errors import TopologyFileError, Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.settings import TopologyName
from netstorm.topology import (
    Link,
    Network,
    Node,
    Policy,
    Rank,
    Routing,
    custom,
    fapt,
    form_policy,
    parse_topology,
)
from netstorm.topology.form import SCHEMES, Options
from netstorm.topology.lower_bound import latency_bound
from netstorm.topology.network import FAMILIES, generate
from netstorm.topology.prediction import predict
from netstorm.topology.resources import Resources, fluid_time, optimum
from netstorm.topology.schemes import sharded
from tests.unit.topology.flow_program import capacity, loads

# ------------------------------------------------------------------------------------------------------ form
# One door to all schemes.


FORMED = sorted(set(SCHEMES) - {"custom"})  # which is read from a file: test_custom.py
SEARCHED = ["auto", "packing", "ring-best"]  # each policy takes a tenth of a second
schemes = st.sampled_from([name for name in FORMED if name not in SEARCHED])


def formed(network: Network, scheme: str, **options: Any) -> Policy:
    """Return a scheme's policy; an overlay that has not the links of a ring is left out."""
    try:
        return form_policy(network, scheme, **options)
    except Unreachable:
        assert scheme in {"ring", "ring-best"}
        reject()


@settings(max_examples=50)
@given(networks(symmetric=None, capped=True, routing=None), schemes, st.integers(0, 9))
def test_every_edge_of_every_policy_is_a_pair_that_may_talk(network: Network, scheme: str, roots: int):
    check(formed(network, scheme, version=7, num_roots=min(roots, network.size)), network)


@pytest.mark.parametrize("scheme", SEARCHED)
@settings(max_examples=10)
@given(network=networks(max_nodes=6, symmetric=None, capped=True, routing=None))
def test_so_it_is_in_policies_that_are_searched_for(network: Network, scheme: str):
    check(formed(network, scheme, version=7, tensors=(3_000_000,)), network)


def check(policy: Policy, network: Network) -> None:
    pairs = set(network.pairs())
    assert policy.version == 7
    assert policy.size == network.size
    assert sum(policy.weights) >= len(policy.trees)
    for tree in policy.trees:  # that they span is checked when they are made
        assert {(rank, parent) for rank, parent in enumerate(tree.reduce_parent) if parent >= 0} <= pairs
        assert {(parent, rank) for rank, parent in enumerate(tree.broadcast_parent) if parent >= 0} <= pairs


@given(networks(symmetric=None), schemes, st.randoms(use_true_random=False))
def test_a_policy_does_not_depend_on_the_order_of_links(network: Network, scheme: str, rng: random.Random):
    check_order(network, scheme, rng)


@pytest.mark.parametrize("scheme", SEARCHED)
@settings(max_examples=5)
@given(network=networks(max_nodes=5, symmetric=None), rng=st.randoms(use_true_random=False))
def test_nor_does_one_that_is_searched_for(network: Network, scheme: str, rng: random.Random):
    check_order(network, scheme, rng)


def check_order(network: Network, scheme: str, rng: random.Random) -> None:
    links = list(network.links)
    rng.shuffle(links)

    assert formed(replace(network, links=tuple(links)), scheme) == formed(network, scheme)


@pytest.mark.parametrize("scheme", FORMED)
@pytest.mark.parametrize("routing", Routing)
def test_a_single_node_is_a_tree_of_its_own(scheme: str, routing: Routing):
    policy = form_policy(replace(Network.uniform(1), routing=routing), scheme)

    assert [(tree.root, tree.reduce_parent, tree.broadcast_parent) for tree in policy.trees] == [
        (0, (-1,), (-1,))
    ]
    assert policy.weights == (1000,)


@pytest.mark.parametrize(("hub", "taken"), [(None, 0), (-1, 0), (2, 2)])
def test_the_settings_way_to_say_any_hub_is_understood(hub: int | None, taken: int):
    assert form_policy(Network.uniform(3), "star", hub=hub).trees[0].root == taken


def test_the_number_of_roots_and_the_chunk_size_reach_the_scheme():
    assert len(form_policy(Network.uniform(5), "fapt", num_roots=2).trees) == 2
    with pytest.raises(UsageError, match="chunk_bytes is -4"):
        form_policy(Network.uniform(2), "fapt", chunk_bytes=-4)


def test_an_unknown_scheme_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match=r"^topology 'rings': expected one of star, sharded, .*custom"):
        form_policy(Network.uniform(2), "rings")


def test_the_settings_allow_exactly_the_schemes_there_are():
    assert list(get_args(TopologyName)) == list(SCHEMES)


def test_an_unknown_option_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match=r"^option 'roots' of a topology: expected one of num_roots, hub, "):
        form_policy(Network.uniform(2), "fapt", roots=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": ()}, "tensors of \\[\\] bytes: expected at least one"),
        ({"tensors": (0, 0)}, "tensors of \\[0, 0\\] bytes: expected at least one"),
        ({"degree": 0}, "degree 0: expected at least 1"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0: expected at least 1"),
    ],
)
def test_options_that_no_scheme_can_use_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=f"^{message}"):
        form_policy(Network.uniform(2), "star", **options)


def test_the_size_of_all_tensors_is_their_sum():
    assert Options(tensors=(100, 20)).tensor_bytes == 120


# ---------------------------------------------------------------------------------------------------- custom
# Trees that somebody wrote down, and what is said about those that are wrong.


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


# -------------------------------------------------------------------------------------------------- feasible
# Of every scheme: its trees span, its pairs may talk, and no resource carries more than it can.


MB = 1_000_000
FORMED_FEASIBLE = [name for name in SCHEMES if name != "custom"]


def check_feasible(network: Network, policy: Policy, nbytes: int) -> None:
    """That the trees span is checked by `Tree` itself; all else is checked here."""
    allowed = set(network.pairs())
    for tree in policy.trees:
        for rank in network.ranks:
            if rank != tree.root:
                assert (rank, tree.reduce_parent[rank]) in allowed
                assert (tree.broadcast_parent[rank], rank) in allowed
    seconds = fluid_time(Resources.of(network), policy, nbytes)
    filled = [
        float(load) * 8 * nbytes / (seconds * capacity(network, resource))
        for resource, load in loads(network, policy).items()
    ]
    assert max(filled) == pytest.approx(1.0)
    assert seconds >= optimum(network, nbytes).seconds * (1 - 1e-6)


@pytest.mark.parametrize("scheme", FORMED_FEASIBLE)
@pytest.mark.parametrize(("family", "nbytes"), list(zip(FAMILIES, itertools.cycle([100_000, 40 * MB]))))
def test_a_scheme_s_policy_is_feasible_and_no_faster_than_physics(scheme, family, nbytes):
    network = generate(family, 7, 5)
    policy = SCHEMES[scheme](network, Options(tensors=(nbytes,))).policy(0)
    check_feasible(network, policy, nbytes)
    found = predict(network, policy, [nbytes], chunk_bytes=256 * 1024).seconds
    assert found >= optimum(network, nbytes).bound_s * (1 - 1e-6)
    assert found >= latency_bound(network, nbytes) * (1 - 1e-6)


@pytest.mark.parametrize("scheme", ["star", "sharded", "mst", "ring-best", "fapt", "packing", "auto"])
@settings(max_examples=8)
@given(network=networks(2, 6, symmetric=None, capped=True, routing=None))
def test_so_it_is_in_strange_networks(scheme, network):
    try:
        policy = SCHEMES[scheme](network, Options(tensors=(4 * MB,))).policy(0)
    except (UsageError, Unreachable):
        assert scheme == "ring-best"  # which not every network has
        return
    check_feasible(network, policy, 4 * MB)
    found = predict(network, policy, [4 * MB], chunk_bytes=256 * 1024).seconds
    assert found >= latency_bound(network, 4 * MB) * (1 - 1e-6)


@pytest.mark.parametrize("scheme", ["fapt", "packing", "auto"])
def test_of_many_equal_links_all_are_loaded_alike_without_a_search(scheme):
    """130 nodes: a search takes a second, and of 512 nodes 20."""
    network = Network.uniform(130)
    stars = sharded(network)
    policy = form_policy(network, scheme, known=False)
    assert policy.trees == stars.trees
    assert len(set(policy.weights)) == 1
    assert form_policy(network, "fapt", known=False, num_roots=2).trees != stars.trees
