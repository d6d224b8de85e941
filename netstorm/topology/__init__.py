"""From a network to a policy: pure functions, one file for each algorithm."""

from __future__ import annotations

from netstorm.topology.networks.elements import Change, Link, Node, Rank
from netstorm.topology.networks.file import dump_network, load_network, parse_network
from netstorm.topology.networks.network import Network, NetworkMismatch, Routing
from netstorm.topology.policy import Plan, Policy
from netstorm.topology.schemes.balanced import balanced
from netstorm.topology.schemes.custom import custom, parse_topology
from netstorm.topology.schemes.fapt import fapt, fastest_paths
from netstorm.topology.schemes.form import SCHEMES, Options, form_policy
from netstorm.topology.schemes.hierarchical import hierarchical
from netstorm.topology.schemes.mst import mst
from netstorm.topology.schemes.ring import ring
from netstorm.topology.schemes.sharded import sharded
from netstorm.topology.schemes.star import star
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import (
    CHUNK_BYTES,
    Delays,
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
