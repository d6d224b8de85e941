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
    if s.elastic_range is not None and not 1 <= s.elastic_range[0] <= s.num_workers <= s.elastic_range[1]:
        found.append(
            f"NETSTORM_ELASTIC={s.elastic}: expected MIN:MAX with 1 <= MIN <= MAX and the nodes that the job "
            f"begins with between them, but {nodes}"
        )
    if s.standbys and s.elastic_range is None:
        found.append(
            f"NETSTORM_STANDBYS={s.standbys}: expected none without NETSTORM_ELASTIC, since a standby "
            "takes over only jobs whose members may change"
        )
    found += _recovery_conflicts(s) + _reproducible_conflicts(s)
    for variable, rank in (("NETSTORM_RANK", s.rank), ("NETSTORM_HUB", s.hub)):
        if rank >= s.places:
            since = f"NETSTORM_ELASTIC={s.elastic}" if s.elastic else nodes
            found.append(f"{variable}={rank}: expected a rank from 0 to {s.places - 1}, since {since}")
    if s.num_roots > s.places:
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
    return found + _key_conflicts(s)


def _key_conflicts(s: Sections) -> list[str]:
    """Return which key files contradict the others, or that there is to be no security."""
    others = (
        ("NETSTORM_NODE_KEY", s.node_key_file),
        ("NETSTORM_SCHEDULER_KEY", s.scheduler_key_file),
        ("NETSTORM_ALLOW", s.allow_file),
    )
    if s.security == "off":
        return [
            f"{variable}={path} with NETSTORM_SECURITY=off: expected one of them, since connections are "
            "either protected by a key, or plain and open to whoever reaches the port: unset the other one"
            for variable, path in (("NETSTORM_KEY_FILE", s.key_file), *others)
            if path
        ]
    return [
        f"{variable}={path}: expected NETSTORM_KEY_FILE beside it, the job's key, with which the scheduler "
        "and the nodes prove that they are of this job"
        for variable, path in others
        if path and not s.key_file
    ]


def _recovery_conflicts(s: Sections) -> list[str]:
    """Return what a scheduler that takes a job over cannot be, too."""
    others = (("NETSTORM_STANDBY=1 (--standby)", s.standby), ("NETSTORM_STATE_DIR (--state)", s.state_dir))
    return [
        f"NETSTORM_RECOVER_PEERS={s.recover_peers} (--recover) with {other}: expected one of them, since a "
        "scheduler takes a job over from its nodes, waits until it is needed, or has the job's log"
        for other, value in others
        if s.recover_peers and value
    ]


def _reproducible_conflicts(s: Sections) -> list[str]:
    """Return what would make the results of a reproducible job depend on the time."""
    others = (
        (f"NETSTORM_ELASTIC={s.elastic}", s.elastic, "who is in a sum depends on when ranks leave and join"),
        (
            f"NETSTORM_LOSS_BOUND={s.loss_bound:g}",
            s.loss_bound,
            "which gradients are late depends on the time",
        ),
        (f"ENABLE_DGT={int(s.dgt)}", s.dgt, "which gradients are late depends on the time"),
    )
    return [
        f"NETSTORM_REPRODUCIBLE=1 with {other}: expected one of them, since {why}; PyTorch's "
        "use_deterministic_algorithms(True) sets the former, unless NETSTORM_REPRODUCIBLE=0"
        for other, value, why in others
        if s.reproducible and value
    ]
