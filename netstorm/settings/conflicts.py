"""Settings that are each allowed, but not together. A new check between two settings belongs here."""

from __future__ import annotations

from typing import Final

from netstorm.settings.sections import Sections

__all__ = ["conflicts"]

_FREEZABLE: Final = ("fapt", "packing", "auto", "star")
"""As `topology.schemes.frozen`: each of these can form other trees for the same roots and shares."""

_WIDEST_ELEMENT: Final = 8
"""Bytes of a float64 or int64, the widest types of a key."""


def conflicts(s: Sections) -> list[str]:
    """Return one sentence for each conflict: the value, what was expected, and why."""
    found = []
    nodes = f"DMLC_NUM_WORKER={s.num_workers}"
    if s.heartbeat_timeout_s < 2 * s.heartbeat_interval_s:
        found.append(
            f"PS_HEARTBEAT_TIMEOUT={s.heartbeat_timeout_s}: expected at least twice "
            f"PS_HEARTBEAT_INTERVAL={s.heartbeat_interval_s}, or one late heartbeat ends the job"
        )
    for variable, rank in (("NETSTORM_RANK", s.rank), ("NETSTORM_HUB", s.hub)):
        if rank >= s.num_workers:
            found.append(f"{variable}={rank}: expected a rank from 0 to {s.num_workers - 1}, since {nodes}")
    if s.num_roots > s.num_workers:
        found.append(f"NUM_ROOT_SERVERS={s.num_roots}: expected at most one root a node, since {nodes}")
    if s.freeze_roots and s.topology not in _FREEZABLE:
        found.append(
            f"NETSTORM_FREEZE_ROOTS=1 with NETSTORM_TOPOLOGY={s.topology}: expected "
            f"{', '.join(_FREEZABLE)}, for which other trees can be formed around the same roots"
        )
    if s.probe_chunk_size > s.chunk_size:
        found.append(
            f"PROBE_CHUNK_SIZE={s.probe_chunk_size}: expected at most CHUNK_SIZE={s.chunk_size}, "
            "or no chunk ever measures a link"
        )
    if 0 < s.largest_chunk < s.chunk_size:
        found.append(
            f"NETSTORM_LARGEST_CHUNK={s.largest_chunk}: expected at least CHUNK_SIZE={s.chunk_size}, or 0"
        )
    if s.max_message_bytes < s.largest_chunk * _WIDEST_ELEMENT:
        found.append(
            f"NETSTORM_MAX_MESSAGE={s.max_message_bytes}: expected at least "
            f"{s.largest_chunk * _WIDEST_ELEMENT} bytes, one chunk of NETSTORM_LARGEST_CHUNK="
            f"{s.largest_chunk} elements of {_WIDEST_ELEMENT} bytes"
        )
    if s.max_message_bytes < s.chunk_size * _WIDEST_ELEMENT:
        found.append(
            f"NETSTORM_MAX_MESSAGE={s.max_message_bytes}: expected at least {s.chunk_size * _WIDEST_ELEMENT} "
            f"bytes, one chunk of CHUNK_SIZE={s.chunk_size} elements of {_WIDEST_ELEMENT} bytes"
        )
    return found
