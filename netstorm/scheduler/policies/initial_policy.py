"""The first policy of a job, and what is assumed before anything is measured."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

from netstorm.errors import SettingsError
from netstorm.protocol.codecs import SLOT_ELEMENT_BYTES, ChunkSizes
from netstorm.scheduler.options import chunk_sizes
from netstorm.scheduler.policies.assumptions import InitialAssumptions, PolicySettings, Workload
from netstorm.settings import Settings
from netstorm.topology.files import load_network, tensors_of
from netstorm.topology.form import form_with_options
from netstorm.topology.network import Network
from netstorm.topology.policy import Policy

__all__ = ["first_policy", "initial_assumptions", "initial_network"]

_CHUNK_S: Final = 0.02
"""Longest time of a chunk on a typical link. A chunk waits as long on each hop before it goes on, and chunks
that queue behind a slowed link are rerouted one by one.
"""

_LEAST_PART: Final = 4
"""Chunks stay at least a fourth of CHUNK_SIZE: each costs processor time, and smaller ones measure no link
(PROBE_CHUNK_SIZE).
"""


def initial_network(settings: Settings) -> Network:
    """Return the network that is planned for before anything has been measured.

    Raises:
        NetworkFileError: NETSTORM_NETWORK names a file that is wrong; says where.
        SettingsError: the file has another number of nodes than the job.
    """
    if not settings.network_file:
        return Network.uniform(settings.places)
    network = load_network(settings.network_file)
    if network.size != settings.places:
        raise SettingsError(
            f"NETSTORM_NETWORK={settings.network_file!r} describes {network.size} nodes, but "
            f"{_places_text(settings)}: both must be the same"
        )
    return network


def _places_text(settings: Settings) -> str:
    if settings.elastic:
        return f"NETSTORM_ELASTIC={settings.elastic}, so the job may have {settings.places}"
    return f"DMLC_NUM_WORKER={settings.num_workers}"


def initial_assumptions(settings: Settings) -> InitialAssumptions:
    """Return all that is assumed before anything is known.

    Raises:
        UsageError: what `initial_network` raises.
    """
    tensors = tensors_of(settings.model)
    network = initial_network(settings)
    known = bool(settings.network_file) and not _is_uniform(network)
    chunks = _chunks_for(network, settings) if known else None
    elements = (chunks or chunk_sizes(settings)).of(max(tensors) // SLOT_ELEMENT_BYTES)
    return InitialAssumptions(
        network=network,
        known=known,
        described=bool(settings.network_file),
        trusted=settings.sources.get("awareness", "default") == "default",
        find_routes=settings.find_routes,
        settings=PolicySettings(
            topology=settings.topology,
            update_time_s=settings.update_time_s,
            update_rate=settings.update_rate,
            num_roots=settings.num_roots,
            hub=settings.hub,
            custom=settings.topology_file,
            seed=settings.seed,
            freeze_roots=settings.freeze_roots,
            auxiliary=settings.aux_path,
            explore=settings.aux_path and settings.awareness,
        ),
        workload=Workload(tensors, elements * SLOT_ELEMENT_BYTES),
        chunks=chunks,
    )


def first_policy(assumptions: InitialAssumptions, *, version: int = 1) -> Policy:
    """Return the policy that a job begins under.

    Raises:
        TopologyFileError: NETSTORM_TOPOLOGY_FILE names a file that is wrong; says where.
        UsageError: what the topology cannot make of the network.
    """
    settings = assumptions.settings
    explores = settings.explore and not assumptions.known
    unmeasured = assumptions.network.linked_pairs() if explores else ()
    options = settings.options(assumptions.workload, known=assumptions.known, unmeasured=unmeasured)
    return form_with_options(assumptions.planned, settings.topology, options, version=version)


def _chunks_for(network: Network, settings: Settings) -> ChunkSizes | None:
    """Return chunk sizes that suit slow links; None: the configured ones do, or were set by the user."""
    if settings.source("chunk_size") != "default":
        return None
    sizes = chunk_sizes(settings)
    size, least = sizes.smallest, max(sizes.smallest // _LEAST_PART, settings.probe_chunk_size)
    typical = statistics.median(link.rate for link in network.links)
    while size // 2 >= least and 8 * SLOT_ELEMENT_BYTES * size > _CHUNK_S * typical:
        size //= 2
    return replace(sizes, smallest=size)


def _is_uniform(network: Network) -> bool:
    """Return whether a network says no more than which links there are."""
    return len({(link.rate, link.latency) for link in network.links}) <= 1 and not any(
        node.egress or node.ingress for node in network.nodes
    )
