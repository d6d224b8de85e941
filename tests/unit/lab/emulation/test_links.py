from __future__ import annotations

from netstorm.lab.emulation.layout import NetworkLayout, needs_netem, shaping_commands, veth_commands
from netstorm.lab.emulation.links import kernel_obstacle
from netstorm.topology.network import Link, Network, Node, Rank

LINK = Link(source=Rank(0), target=Rank(1), rate=100e6, latency=0.015, loss=0.0002)
HTB = "rate 100000000bit ceil 100000000bit burst 16000 cburst 16000"
PLAIN = Link(source=Rank(0), target=Rank(1), rate=100e6)


def network(link: Link, egress: float | None = None) -> NetworkLayout:
    nodes = (Node(rank=Rank(0), egress=egress), Node(rank=Rank(1)))
    return NetworkLayout(name="test", network=Network(nodes=nodes, links=(link,)))


def test_netem_delays_and_loses_and_htb_below_it_limits_the_rate_and_the_queue():
    assert shaping_commands(LINK, "to-r1") == [
        "qdisc add dev to-r1 root handle 1: netem delay 15000us loss 0.0200000% limit 1125",
        "qdisc add dev to-r1 parent 1:1 handle 2: htb default 1",
        f"class add dev to-r1 parent 2: classid 2:1 htb {HTB}",
        "qdisc add dev to-r1 parent 2:1 handle 3: bfifo limit 1250000",
    ]


def test_a_change_keeps_the_queues():
    commands = shaping_commands(LINK, "to-r1", change=True)
    assert [command.split()[:2] for command in commands] == [
        ["qdisc", "change"],
        ["class", "change"],
        ["qdisc", "change"],
    ]


def test_without_latency_and_loss_htb_alone_is_at_the_root():
    assert not needs_netem(PLAIN)
    commands = shaping_commands(PLAIN, "to-r1", with_netem=False)
    assert commands[0] == "qdisc add dev to-r1 root handle 2: htb default 1"
    assert not any("netem" in command for command in commands)


def test_segmentation_offload_is_off_at_both_ends_of_a_pair():
    (command,) = veth_commands(("a", "b"), ("to-r1", "to-r0"))
    assert command == (
        "link add name to-r1 netns a mtu 1500 gso_max_segs 1 type veth peer "
        "name to-r0 netns b mtu 1500 gso_max_segs 1"
    )


def test_the_reason_for_not_taking_the_kernel_is_named():
    assert kernel_obstacle(network(LINK), netem=False) == "this kernel has no netem"
    assert kernel_obstacle(network(LINK), netem=True) is None
    assert kernel_obstacle(network(PLAIN), netem=False) is None
    assert kernel_obstacle(network(PLAIN, egress=1e6), netem=True) == (
        "rank 0 has an access cap, which spans its links"
    )
