"""From a network to a policy: pure functions, one file for each algorithm.

What is here is imported when it is first used: a node needs policies alone, and no reader of network files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netstorm.topology.files import custom, dump_network, load_network, parse_network, parse_topology
    from netstorm.topology.form import SCHEMES, Options, form_policy
    from netstorm.topology.network import Change, Link, Network, NetworkMismatch, Node, Rank, Routing
    from netstorm.topology.policy import Forest, Plan, Policy
    from netstorm.topology.schemes import (
        balanced,
        cheapest,
        fapt,
        fastest_paths,
        hierarchical,
        k_ary,
        mst,
        ring,
        sharded,
        star,
    )
    from netstorm.topology.tree import (
        CHUNK_BYTES,
        Delays,
        Tree,
        broadcast_delay,
        reduce_delay,
        subtree_delay,
        transfer_delays,
        tree_delay,
    )

__all__ = [
    "CHUNK_BYTES",
    "SCHEMES",
    "Change",
    "Delays",
    "Forest",
    "Link",
    "Network",
    "NetworkMismatch",
    "Node",
    "Options",
    "Plan",
    "Policy",
    "Rank",
    "Routing",
    "Tree",
    "balanced",
    "broadcast_delay",
    "cheapest",
    "custom",
    "dump_network",
    "fapt",
    "fastest_paths",
    "form_policy",
    "hierarchical",
    "k_ary",
    "load_network",
    "mst",
    "parse_network",
    "parse_topology",
    "reduce_delay",
    "ring",
    "sharded",
    "star",
    "subtree_delay",
    "transfer_delays",
    "tree_delay",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in ("network", "tree", "policy", "schemes", "form", "files"):  # cheap ones first
                found = vars(import_module(f"netstorm.topology.{module}"))
                if name in found:
                    return globals().setdefault(name, found[name])
        raise AttributeError(f"module 'netstorm.topology' has no attribute {name!r}")
