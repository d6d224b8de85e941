"""What policies are formed from, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from netstorm.settings.kinds import one_of, setting, switch, whole, words

__all__ = ["PlanningSettings", "TopologyName"]

TopologyName: TypeAlias = Literal[
    "star",
    "sharded",
    "balanced",
    "mst",
    "ring",
    "ring-best",
    "hierarchical",
    "fapt",
    "packing",
    "auto",
    "custom",
]


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """What policies are formed from, and how."""

    network_file: str = setting(
        "NETSTORM_NETWORK",
        words(r"[^\0]*", "the path of a network file"),
        "",
        "",
        "file that describes the network, read by the scheduler; empty: all links are assumed equal",
    )
    state_dir: str = setting(
        "NETSTORM_STATE_DIR",
        words(r"[^\0]*", "the path of a folder"),
        "",
        "",
        "folder in which the scheduler keeps a log of each job, so that it can be started again if its "
        "process ends; empty: it keeps none",
    )
    find_routes: bool = setting(
        "NETSTORM_FIND_ROUTES",
        switch(),
        True,
        "",
        "without NETSTORM_NETWORK: plan without pairs of nodes whose latencies say that their ways lead past "
        "other nodes, and share lines with these",
    )
    topology: TopologyName = setting(
        "NETSTORM_TOPOLOGY",
        one_of(*get_args(TopologyName)),
        "auto",
        "",
        "how trees are formed; star: all nodes to one hub; sharded: each node is the hub of an equal share; "
        "balanced: a binary tree in order of rank; mst: the fastest links; ring: in order of rank; "
        "ring-best: in the order that suits the links; hierarchical: nodes to their site's leader, leaders "
        "among themselves; fapt: a fastest aggregation path tree for each root; packing: many "
        "trees that together use all of the network; auto: what is predicted to be fastest, and fapt "
        "while nothing is known of the links; custom: those in "
        "NETSTORM_TOPOLOGY_FILE",
    )
    topology_file: str = setting(
        "NETSTORM_TOPOLOGY_FILE",
        words(r"[^\0]*", "the path of a topology file"),
        "",
        "",
        "file that holds the trees of NETSTORM_TOPOLOGY=custom, read by the scheduler",
    )
    model: str = setting(
        "NETSTORM_MODEL",
        words(r"[^\0]+", "alexnet, resnet50, a size such as 244MB, or the path of a .json file"),
        "100MB",
        "",
        "what is summed in an iteration, as far as it is known before the job: trees are formed for it",
    )
    hub: int = setting("NETSTORM_HUB", whole(-1), -1, "", "rank of a star's hub; -1: the best placed one")
    freeze_roots: bool = setting(
        "NETSTORM_FREEZE_ROOTS",
        switch(),
        False,
        "",
        "keep the roots and their shares as in the first policy, as the paper must; for "
        "NETSTORM_TOPOLOGY=fapt, packing, auto and star",
    )
