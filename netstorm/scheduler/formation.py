"""The policy that a job begins under: from the network file, or as if all links were equal."""

from __future__ import annotations

from netstorm.errors import SettingsError
from netstorm.protocol.chunks import SLOT_ELEMENT_BYTES
from netstorm.scheduler.options import chunk_sizes
from netstorm.settings import Settings
from netstorm.topology.form import form_policy
from netstorm.topology.models import tensors_of
from netstorm.topology.network import Network
from netstorm.topology.network_file import load_network
from netstorm.topology.policy import Policy

__all__ = ["assumed_network", "first_policy"]


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


def first_policy(settings: Settings) -> Policy:
    """Return policy version 1.

    Raises:
        TopologyFileError: NETSTORM_TOPOLOGY_FILE names a file that is wrong; says where.
        UsageError: what `assumed_network` raises, and what the topology cannot make of the network.
    """
    tensors = tensors_of(settings.model)
    elements = chunk_sizes(settings).of(max(tensors) // SLOT_ELEMENT_BYTES)
    return form_policy(
        assumed_network(settings),
        settings.topology,
        version=1,
        num_roots=settings.num_roots,
        hub=settings.hub,
        chunk_bytes=elements * SLOT_ELEMENT_BYTES,
        tensors=tensors,
        custom=settings.topology_file,
        seed=settings.seed,
        known=bool(settings.network_file),
    )
