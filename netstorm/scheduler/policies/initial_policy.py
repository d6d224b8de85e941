"""What is assumed before anything is measured, and the policy that a job begins under."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

from netstorm.errors import SettingsError
from netstorm.protocol.chunks import SLOT_ELEMENT_BYTES, ChunkSizes
from netstorm.scheduler.options import chunk_sizes
from netstorm.scheduler.policies.adaptation import Assumed, Plan, Summed
from netstorm.settings import Settings
from netstorm.topology.networks.file import load_network
from netstorm.topology.networks.network import Network
from netstorm.topology.networks.tensor_sizes import tensors_of
from netstorm.topology.policy import Policy
from netstorm.topology.schemes.form import form_policy

__all__ = ["assumed", "assumed_network", "first_policy"]

_CHUNK_S: Final = 0.02
"""What a chunk takes on a typical link at most. It waits for so long on each hop before it goes on; and what
waits behind a link that has become slow is seen, and sent another way, by the chunk.
"""

_LEAST_PART: Final = 4
"""Part of CHUNK_SIZE that chunks do not become smaller than for that: each costs processor time, and smaller
ones measure no link (PROBE_CHUNK_SIZE).
"""


def assumed_network(settings: Settings) -> Network:
    """Return the network that is planned for before anything has been measured.

    Raises:
        NetworkFileError: NETSTORM_NETWORK names a file that is wrong; says where.
        SettingsError: the file has another number of nodes than the job.
    """
    if not settings.network_file:
        return Network.uniform(settings.num_workers)
    network = load_network(settings.network_file)
    if network.size != settings.num_workers:
        raise SettingsError(
            f"NETSTORM_NETWORK={settings.network_file!r} describes {network.size} nodes, but "
            f"DMLC_NUM_WORKER={settings.num_workers}: both must be the same"
        )
    return network


def assumed(settings: Settings) -> Assumed:
    """Return all that is assumed before anything is known.

    Raises:
        UsageError: what `assumed_network` raises.
    """
    tensors = tensors_of(settings.model)
    network = assumed_network(settings)
    known = bool(settings.network_file) and not _all_alike(network)
    chunks = _chunks_for(network, settings) if known else None
    elements = (chunks or chunk_sizes(settings)).of(max(tensors) // SLOT_ELEMENT_BYTES)
    return Assumed(
        network=network,
        known=known,
        described=bool(settings.network_file),
        trusted=settings.sources.get("awareness", "default") == "default",
        find_routes=settings.find_routes,
        plan=Plan(
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
        summed=Summed(tensors, elements * SLOT_ELEMENT_BYTES),
        chunks=chunks,
    )


def _chunks_for(network: Network, settings: Settings) -> ChunkSizes | None:
    """Return sizes of chunks that suit slow links; None: what the settings say suits them, or is wanted."""
    if settings.source("chunk_size") != "default":
        return None
    sizes = chunk_sizes(settings)
    size, least = sizes.smallest, max(sizes.smallest // _LEAST_PART, settings.probe_chunk_size)
    typical = statistics.median(link.rate for link in network.links)
    while size // 2 >= least and 8 * SLOT_ELEMENT_BYTES * size > _CHUNK_S * typical:
        size //= 2
    return replace(sizes, smallest=size)


def _all_alike(network: Network) -> bool:
    """Return whether a network says no more than which links there are."""
    return len({(link.rate, link.latency) for link in network.links}) <= 1 and not any(
        node.egress or node.ingress for node in network.nodes
    )


def first_policy(assumption: Assumed, *, version: int = 1) -> Policy:
    """Return the policy that a job begins under.

    Raises:
        TopologyFileError: NETSTORM_TOPOLOGY_FILE names a file that is wrong; says where.
        UsageError: what the topology cannot make of the network.
    """
    plan, summed = assumption.plan, assumption.summed
    return form_policy(
        assumption.planned,
        plan.topology,
        version=version,
        num_roots=plan.num_roots,
        hub=plan.hub,
        chunk_bytes=summed.chunk_bytes,
        tensors=summed.tensors,
        custom=plan.custom,
        seed=plan.seed,
        known=assumption.known,
        auxiliary=plan.auxiliary,
        unmeasured=assumption.network.linked_pairs() if plan.explore and not assumption.known else (),
    )
