"""The predictor against times worked out by hand, and against bounds that no transfer can break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology.network import Change, Network, Node, Rank, Routing, generate
from netstorm.topology.policy import Policy
from netstorm.topology.prediction import chunks_of, predict
from netstorm.topology.resources import Resources, fluid_time
from netstorm.topology.schemes import fapt, star
from netstorm.topology.tree import Tree, transfer_delays, tree_delay

MB = 1_000_000
RATE = 8e6  # 1 MB takes a second


def chain(nodes: int) -> Policy:
    tree = Tree.undirected(Rank(0), tuple(range(-1, nodes - 1)))
    return Policy(version=0, trees=(tree,), weights=(1,))


def star_at_0(nodes: int) -> Policy:
    return Policy(version=0, trees=(Tree.undirected(Rank(0), (-1, *[0] * (nodes - 1))),), weights=(1,))


def seconds(network: Network, policy: Policy, *tensors: int, start: float = 0.0) -> float:
    return predict(network, policy, tensors, chunk_bytes=MB, start=start).seconds


def test_one_chunk_is_stored_and_forwarded_on_every_hop_up_and_down():
    network = Network.uniform(4, rate=RATE, latency=0.25)
    assert seconds(network, chain(4), MB) == pytest.approx(6 * 1.25)


def test_more_chunks_fill_the_pipeline():
    # The last of 10 chunks leaves the leaf after 10 s, and has 5 more hops of 1.25 s.
    network = Network.uniform(4, rate=RATE, latency=0.25)
    assert seconds(network, chain(4), 10 * MB) == pytest.approx(10 + 0.25 + 5 * 1.25)


def test_half_a_chunk_takes_half_the_time():
    assert seconds(Network.uniform(2, rate=RATE), chain(2), MB // 2) == pytest.approx(2 * 0.5)


def test_children_of_one_hub_share_its_access_line_and_no_other():
    network = Network.uniform(4, rate=RATE)
    assert seconds(network, star_at_0(4), MB) == pytest.approx(1 + 1)
    capped = replace(network, nodes=(Node(rank=Rank(0), ingress=RATE), *network.nodes[1:]))
    assert seconds(capped, star_at_0(4), MB) == pytest.approx(3 + 1)


def test_routed_pairs_share_the_links_under_them():
    line = Network.uniform(3, rate=RATE)
    ends = ((0, 1), (1, 0), (1, 2), (2, 1))
    line = replace(
        line,
        links=tuple(link for link in line.links if (link.source, link.target) in ends),
        routing=Routing.UNDERLAY,
    )
    # 2→0 and 1→0 share 1→0 at half its rate each, both for 2 s; and the same downwards.
    assert seconds(line, star_at_0(3), MB) == pytest.approx(2 + 2)


def test_loss_lowers_goodput():
    network = Network.uniform(2, rate=RATE)
    lossy = replace(network, links=tuple(replace(link, loss=0.2) for link in network.links))
    assert seconds(lossy, chain(2), MB) == pytest.approx(2 / 0.8)


def test_a_change_of_rate_holds_also_for_what_is_under_way():
    change = Change(at=10.5, source=Rank(1), target=Rank(0), rate=RATE / 2)
    network = replace(Network.uniform(2, rate=RATE), changes=(change,))
    assert seconds(network, chain(2), MB) == pytest.approx(2)
    assert seconds(network, chain(2), MB, start=10.0) == pytest.approx(0.5 + 1 + 1)
    assert seconds(network, chain(2), MB, start=11.0) == pytest.approx(2 + 1)


def test_the_most_urgent_chunk_goes_first_on_each_connection():
    # One chunk goes over a slow link first, so that it comes to rank 1 after 10 s, when all the others wait
    # there for 1→0. It overtakes those beyond the window, or its longer way down would end after theirs.
    network = Network.uniform(3, rate=RATE)
    slow = tuple(
        replace(link, rate=RATE / 10) if (link.source, link.target) == (2, 1) else link
        for link in network.links
    )
    through_1 = Tree(root=Rank(0), reduce_parent=(-1, 0, 1), broadcast_parent=(-1, 0, 1))
    direct = Tree.undirected(Rank(0), (-1, 0, 0))
    policy = Policy(version=0, trees=(through_1, direct), weights=(1, 25))
    assert seconds(replace(network, links=slow), policy, 26 * MB) == pytest.approx(26 + 1)


def test_small_tensors_share_slots_as_their_bytes_do():
    policy = Policy(version=0, trees=(chain(3).trees[0], star_at_0(3).trees[0]), weights=(1, 1))
    trees = [chunk.tree for chunk in chunks_of(policy, [MB // 2] * 4, MB)]
    assert trees[0] == trees[1] != trees[2] == trees[3]
    assert [chunk.bits for chunk in chunks_of(policy, [2 * MB + 4], MB)] == [8 * MB, 8 * MB, 32]


def test_bits_are_what_the_trees_put_on_links():
    found = predict(Network.uniform(3, rate=RATE), chain(3), [5 * MB + 4], chunk_bytes=MB)
    assert found.bits == dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1)), 8 * (5 * MB + 4))


def test_one_node_and_no_bytes_take_no_time():
    alone = Policy(version=0, trees=(Tree.undirected(Rank(0), (-1,)),), weights=(1,))
    assert seconds(Network.uniform(1), alone, MB) == 0.0
    assert seconds(Network.uniform(3), chain(3)) == 0.0
    assert seconds(Network.uniform(3), chain(3), 0) == 0.0


@settings(max_examples=50)
@given(
    networks(min_nodes=2, max_nodes=6, capped=True, changing=True, routing=None),
    st.integers(0, 2),
    st.lists(st.integers(1, 3 * MB), min_size=1, max_size=4),
)
def test_no_prediction_beats_the_fluid_time_or_the_latency_of_a_chunk(network, roots, tensors):
    network = replace(network, changes=())
    policy = fapt(network, min(roots, network.size)).policy(0)
    chunk_bytes = 256 * 1024
    found = predict(network, policy, tensors, chunk_bytes=chunk_bytes)
    resources = Resources.of(network)
    volumes = [0.0] * len(resources.pairs)
    for pair, bits in found.bits.items():
        volumes[resources.place(pair)] = bits
    loads = resources.matrix @ volumes
    assert found.seconds >= float((loads / resources.capacities).max()) * (1 - 1e-6)
    smallest = transfer_delays(network, min(*tensors, chunk_bytes))
    assert found.seconds >= min(tree_delay(tree, smallest) for tree in policy.trees) * (1 - 1e-6)
    total = sum(chunk.bits for chunk in chunks_of(policy, tensors, chunk_bytes))
    assert sum(found.bits.values()) == pytest.approx(2 * (network.size - 1) * total)


@settings(max_examples=20)
@given(networks(min_nodes=2, max_nodes=6, capped=True, changing=True, routing=None))
def test_the_same_question_has_the_same_answer(network):
    policy = fapt(network).policy(0)
    one, other = (predict(network, policy, [MB, 2 * MB], chunk_bytes=256 * 1024) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("family", ["mesh", "internet2", "cloud", "asymmetric"])
def test_merged_chunks_tell_nearly_the_same(family):
    network = generate(family, 9, 3)
    policy = star(network, None).policy(0)
    exact = predict(network, policy, [100 * MB], chunk_bytes=128 * 1024).seconds
    merged = predict(network, policy, [100 * MB], chunk_bytes=128 * 1024, most_chunks=400).seconds
    assert merged == pytest.approx(exact, rel=0.03)
    fluid = fluid_time(Resources.of(network), policy, 100 * MB)
    assert fluid <= exact <= 1.1 * fluid


def test_senseless_questions_are_refused():
    network = Network.uniform(3)
    with pytest.raises(UsageError, match="at least 1 byte"):
        predict(network, chain(3), [MB], chunk_bytes=0)
    with pytest.raises(UsageError, match="no negative sizes"):
        predict(network, chain(3), [-1], chunk_bytes=MB)
    with pytest.raises(UsageError, match="start is -1"):
        predict(network, chain(3), [MB], chunk_bytes=MB, start=-1)
    with pytest.raises(UsageError, match="trees of 4 ranks for a network of 3"):
        predict(network, chain(4), [MB], chunk_bytes=MB)


@settings(max_examples=25)
@given(networks(2, 6, symmetric=None, capped=True, routing=None), st.integers(1, 60))
def test_what_is_known_at_once_is_what_comes_of_rates_that_are_worked_out_at_every_step(network, megabytes):
    link = network.links[0]
    later = Change(at=1e8, source=link.source, target=link.target, rate=link.rate)
    stepwise = replace(network, changes=(later,))
    policy = replace(fapt(network), look_ahead=8 * MB, look_ahead_s=1.0).policy(0)
    assert seconds(network, policy, megabytes * MB) == pytest.approx(
        seconds(stepwise, policy, megabytes * MB), rel=1e-6
    )
