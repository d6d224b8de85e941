"""Settings of planning: what policies are formed from, and how."""

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
        "network file, read by the scheduler; empty: all links are assumed equal",
    )
    state_dir: str = setting(
        "NETSTORM_STATE_DIR",
        words(r"[^\0]*", "the path of a folder"),
        "",
        "",
        "folder for the scheduler's log of each job, from which it can be restarted after a crash; empty: no "
        "log",
    )
    find_routes: bool = setting(
        "NETSTORM_FIND_ROUTES",
        switch(),
        True,
        "",
        "without NETSTORM_NETWORK: leave out pairs of nodes whose latencies show that they are routed past "
        "other nodes, and share those nodes' links",
    )
    topology: TopologyName = setting(
        "NETSTORM_TOPOLOGY",
        one_of(*get_args(TopologyName)),
        "auto",
        "",
        "scheme that forms the trees; star: all nodes below one hub; sharded: each node is the hub of an "
        "equal share; balanced: a binary tree in order of rank; mst: a minimum spanning tree of the fastest "
        "links; ring: in order of rank; ring-best: in the order that suits the links; hierarchical: nodes "
        "below their site's leader, leaders among themselves; fapt: a fastest aggregation path tree for each "
        "root; packing: many trees that together use the whole network; auto: the scheme that is predicted "
        "to be fastest, or fapt while no link is known; custom: the trees in NETSTORM_TOPOLOGY_FILE",
    )
    topology_file: str = setting(
        "NETSTORM_TOPOLOGY_FILE",
        words(r"[^\0]*", "the path of a topology file"),
        "",
        "",
        "file with the trees of NETSTORM_TOPOLOGY=custom, read by the scheduler",
    )
    model: str = setting(
        "NETSTORM_MODEL",
        words(r"[^\0]+", "alexnet, resnet50, a size such as 244MB, or the path of a .json file"),
        "100MB",
        "",
        "tensors of one iteration, for which trees are formed before the job's own are known",
    )
    hub: int = setting("NETSTORM_HUB", whole(-1), -1, "", "rank of a star's hub; -1: the best placed node")
    freeze_roots: bool = setting(
        "NETSTORM_FREEZE_ROOTS",
        switch(),
        False,
        "",
        "keep the roots and shares of the first policy in all later ones, as in the paper; for "
        "NETSTORM_TOPOLOGY=fapt, packing, auto and star",
    )
    reproducible: bool = setting(
        "NETSTORM_REPRODUCIBLE",
        switch(),
        False,
        "",
        "the same job gives the same bits in each run: values are added in a fixed order, in the trees of "
        "the first policy; PyTorch's use_deterministic_algorithms(True) sets it for a job that was not "
        "given it",
    )
