"""What a job's traffic costs, by the prices of links in the network file. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.errors import Unreachable
from netstorm.scheduler.status import NodeView, TreeStatus, tree_traffic
from netstorm.topology.network import Network, Rank

__all__ = ["cost_an_hour"]


def cost_an_hour(network: Network, nodes: Sequence[NodeView], trees: Sequence[TreeStatus]) -> float | None:
    """Return what traffic at the nodes' present rates costs an hour, in the network file's currency.

    Nodes say what they send, not to whom: it is divided among a node's links as trees divide the data. Where
    all links out of a node have one price, as in clouds, that is exact.

    Args:
        network: whose links have prices, of 10⁹ bytes.
        nodes: with the bit/s that they send.
        trees: of the policy in force.

    Returns:
        None: no link has a price, or no node has said what it sends.
    """
    sending = {
        node.rank: node.sending for node in nodes if node.rank is not None and node.sending is not None
    }
    if not sending or not any(link.price for link in network.links):
        return None
    carried, priced = dict[int, float](), dict[int, float]()
    for (source, target), share in tree_traffic(trees).items():
        if source in sending:
            carried[source] = carried.get(source, 0.0) + share
            priced[source] = priced.get(source, 0.0) + share * _price(network, source, target)
    return sum(sending[rank] / 8e9 * 3600 * priced[rank] / share for rank, share in carried.items() if share)


def _price(network: Network, source: int, target: int) -> float:
    try:
        return sum(link.price for link in network.route(Rank(source), Rank(target)))
    except Unreachable:  # in the file; the job has found a way
        return 0.0
