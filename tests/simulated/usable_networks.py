"""Random networks on which a job can run."""

from __future__ import annotations

from dataclasses import replace


def usable(network, least=1e6):
    """Return a network without lines so slow that a handshake would take longer than the time-outs."""

    def lifted(rate):
        return None if rate is None else max(rate, least)

    return replace(
        network,
        nodes=tuple(
            replace(node, egress=lifted(node.egress), ingress=lifted(node.ingress)) for node in network.nodes
        ),
        links=tuple(replace(link, rate=lifted(link.rate)) for link in network.links),
        changes=tuple(replace(change, rate=lifted(change.rate)) for change in network.changes),
    )
