"""From a network to a policy: pure functions, one file an algorithm."""

from __future__ import annotations

from netstorm.topology.balanced import balanced
from netstorm.topology.custom import custom, parse_topology
from netstorm.topology.elements import Change, Link, Node, Rank
from netstorm.topology.fapt import fapt, fastest_paths
from netstorm.topology.forest import Forest
from netstorm.topology.form import SCHEMES, Options, form_policy
from netstorm.topology.hierarchical import hierarchical
from netstorm.topology.metric import (
    CHUNK_BYTES,
    Delays,
    broadcast_delay,
    reduce_delay,
    subtree_delay,
    transfer_delays,
    tree_delay,
)
from netstorm.topology.mst import mst
from netstorm.topology.network import Misfit, Network, Routing
from netstorm.topology.network_file import dump_network, load_network, parse_network
from netstorm.topology.policy import Plan, Policy, Tree
from netstorm.topology.ring import ring
from netstorm.topology.sharded import sharded
from netstorm.topology.star import star

__all__ = [
    "CHUNK_BYTES",
    "SCHEMES",
    "Change",
    "Delays",
    "Forest",
    "Link",
    "Misfit",
    "Network",
    "Node",
    "Options",
    "Plan",
    "Policy",
    "Rank",
    "Routing",
    "Tree",
    "balanced",
    "broadcast_delay",
    "custom",
    "dump_network",
    "fapt",
    "fastest_paths",
    "form_policy",
    "hierarchical",
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
