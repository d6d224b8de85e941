"""Who takes part in a race on a network: its systems by name, each with what it must know of the network.

A row may be made of several groups of processes (a star's average hub), or of none: then it says why.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from netstorm.errors import Unreachable, UsageError
from netstorm.topology.files import dump_network
from netstorm.topology.form import SCHEMES, form_policy
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.topology.resources import Resources, fluid_time
from race.course import networks_by_time
from systems.base import System
from systems.gloo import Gloo
from systems.hivemind import Hivemind, why_no_hivemind
from systems.mxnet_dist import MXNetDist
from systems.netstorm_store import NetStormStore
from systems.openmpi.system import OpenMPI, why_no_openmpi
from systems.torch_ddp import TORCH_GLOO, TORCH_NETSTORM, TorchDDP

__all__ = ["KNOWLEDGE", "NAMES", "Entrant", "Entry", "check_name", "enter", "hubs_by_time"]

_MEAN_HUBS: Final = 3
"""How many hubs stand for the average one. Each takes a round of its own, the slowest of the whole race."""

_STAGES: Final = {
    "lite": {"ENABLE_AWARENESS": "0", "ENABLE_AUX_PATH": "0"},
    "std": {"ENABLE_AWARENESS": "1", "ENABLE_AUX_PATH": "0"},
    "pro": {"ENABLE_AWARENESS": "1", "ENABLE_AUX_PATH": "1"},
}
"""The paper's three: trees alone, trees that follow the network, auxiliary paths beside them."""

_PAPER: Final = "paper-"
"""Before a stage: as the paper has it, and not with our rules (`NETSTORM_PRESET`)."""

KNOWLEDGE: Final = ("rates", "links", "nothing")
"""Of the network, at the start of a job: all of the file; which pairs it joins; not even that."""

_ANY_RATE: Final = 100e6
"""Of links of unknown rates: what NetStorm assumes of all links while it knows none."""

_TOPOLOGIES: Final = tuple(name for name in SCHEMES if name != "custom")  # it needs a file of its own

NAMES: Final = (
    "mxnet-star-best",
    "mxnet-star-worst",
    "mxnet-star-mean",
    "mxnet-sharded",
    "gloo",
    "openmpi",
    "hivemind",
    *(f"netstorm-{name}" for name in _TOPOLOGIES),
    "netstorm-lite",
    "netstorm-std",
    "netstorm-pro",
    *(f"netstorm-paper-{stage}" for stage in ("lite", "std", "pro")),
    TORCH_GLOO,
    TORCH_NETSTORM,
)
"""Of all systems, as the command line and the results call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One row of the results."""

    name: str
    systems: tuple[System, ...] = ()
    """Its round is the mean of theirs: several where a name stands for an average."""
    why_not: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What entrants are made for."""

    network: Network
    folder: Path
    """For network files, which NetStorm's scheduler reads."""
    bytes: int
    model: str = ""
    """Whose tensors the bytes are, if they are a model's."""
    seed: int = 1
    """Of the choice of the average hubs."""
    trace: bool = False
    """Have NetStorm's nodes write the timeline of each chunk into the folder."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Settings for NetStorm on top of each system's own."""
    knowledge: str = KNOWLEDGE[0]
    """What NetStorm is told of the network as it is at its start."""


def enter(names: Sequence[str], entry: Entry) -> list[Entrant]:
    """Return the entrants of these names.

    Raises:
        UsageError: a name that there is not, or a network on which nothing can run.
    """
    return [_enter(name, entry) for name in names]


def check_name(name: str) -> None:
    """Look whether there is such a system.

    Raises:
        UsageError: there is not; says which there are.
    """
    system, *settings = name.split("@")
    if system not in NAMES:
        raise UsageError(f"no system {system!r}; there are {', '.join(NAMES)}")
    for setting in settings:
        if not system.startswith(("netstorm-", TORCH_NETSTORM)) or not setting.partition("=")[1]:
            raise UsageError(
                f"{name!r}: settings are for NetStorm, such as netstorm-packing@CHUNK_SIZE=32768; "
                "one without a value is not set (netstorm-auto@NETSTORM_NETWORK= is told nothing)"
            )


def _enter(name: str, entry: Entry) -> Entrant:
    check_name(name)
    if name.startswith("mxnet-star-"):
        return _star(name, entry)
    if name == "mxnet-sharded":
        return Entrant(name=name, systems=(MXNetDist(name=name, servers=None),))
    if name == "gloo":
        return Entrant(name=name, systems=(Gloo(),))
    if name == "openmpi":
        return _if_installed(name, why_no_openmpi(), OpenMPI(folder=entry.folder))
    if name == "hivemind":
        return _if_installed(name, why_no_hivemind(), Hivemind(folder=entry.folder))
    if name == TORCH_GLOO:
        return Entrant(name=name, systems=(TorchDDP(kind=name, job=Gloo(name=name)),))
    system, *given = name.split("@")
    variables = dict(setting.split("=", 1) for setting in given)
    if system == TORCH_NETSTORM:
        job = _netstorm(name, "packing", entry, variables)
        return Entrant(name=name, systems=(TorchDDP(kind=TORCH_NETSTORM, job=job),))
    stage = system.removeprefix("netstorm-")
    preset = {"NETSTORM_PRESET": "paper"} if stage.startswith(_PAPER) else {}
    stage = stage.removeprefix(_PAPER)
    job = (
        _netstorm(name, "fapt", entry, {**preset, **_STAGES[stage], **variables})
        if stage in _STAGES
        else _netstorm(name, stage, entry, variables)
    )
    return Entrant(name=name, systems=(job,))


def _if_installed(name: str, why_not: str, system: System) -> Entrant:
    return Entrant(name=name, why_not=why_not) if why_not else Entrant(name=name, systems=(system,))


def hubs_by_time(network: Network, nbytes: float) -> list[Rank]:
    """Return the ranks by the fluid time of a parameter server beside each, the fastest first.

    Where the network changes, each of its phases counts alike: only hindsight finds this best hub.
    Workers reach a server over the fewest hops, whatever the network's overlay allows NetStorm's planner.
    """
    network = replace(network, routing=Routing.UNDERLAY)
    speeds = dict.fromkeys(network.ranks, 0.0)
    for _, still in networks_by_time(network):
        resources = Resources.of(still)
        for rank in network.ranks:
            speeds[rank] += 1 / fluid_time(resources, form_policy(still, "star", hub=rank), nbytes)
    return sorted(speeds, key=lambda rank: (-speeds[rank], rank))


def _star(name: str, entry: Entry) -> Entrant:
    hubs = hubs_by_time(entry.network, entry.bytes)
    which = name.removeprefix("mxnet-star-")
    if which == "mean":
        chosen = random.Random(entry.seed).sample(hubs, min(_MEAN_HUBS, len(hubs)))
        systems = tuple(MXNetDist(name=f"{name}, hub {hub}", servers=1, hub=hub) for hub in sorted(chosen))
        return Entrant(name=name, systems=systems)
    hub = hubs[0] if which == "best" else hubs[-1]
    return Entrant(name=name, systems=(MXNetDist(name=name, servers=1, hub=hub),))


def _netstorm(name: str, topology: str, entry: Entry, variables: dict[str, str]) -> NetStormStore:
    network = entry.network.at(0.0)
    network = replace(network, changes=())
    topology = variables.get("NETSTORM_TOPOLOGY", topology)
    try:
        form_policy(network, topology)
    except Unreachable:  # it sends between ranks that the overlay does not join: over the routes, as peers do
        network = replace(network, routing=Routing.UNDERLAY)
    told = {}
    if entry.knowledge != "nothing":
        path = entry.folder / f"{name}.yaml"
        known = network if entry.knowledge == "rates" else _all_alike(network)
        path.write_text(dump_network(known), encoding="utf-8")
        told = {"NETSTORM_NETWORK": str(path)}
    variables = {
        "NETSTORM_TOPOLOGY": topology,
        **told,
        "NETSTORM_MODEL": entry.model or f"{entry.bytes}B",
        **entry.variables,
        **variables,
    }
    if entry.trace:
        variables["NETSTORM_TRACE"] = str(entry.folder / f"{name}.trace.json")
    return NetStormStore(name=name, variables=variables)


def _all_alike(network: Network) -> Network:
    """Return a network whose links join the same pairs, and of which nothing else is known."""
    links = tuple(Link(source=link.source, target=link.target, rate=_ANY_RATE) for link in network.links)
    nodes = tuple(replace(node, egress=None, ingress=None) for node in network.nodes)
    return replace(network, links=links, nodes=nodes)
