"""Checks of received parts: each must agree with what the scheduler has fixed. Pure."""

from __future__ import annotations

from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.undetermined import UndeterminedForm
from netstorm.protocol.chunks import UNDETERMINED_FORM
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer, bits_from_wire, ranks_in
from netstorm.protocol.messages import Part, Phase
from netstorm.topology.policy import Plan

__all__ = ["ROUNDS_AHEAD", "check_part"]

ROUNDS_AHEAD: Final = 2
"""How far beyond its last complete round of a key a node may contribute. It bounds what others must store."""


def check_part(
    peer: Peer,
    part: Part,
    payload: Buffer | None,
    *,
    key: Key,
    plan: Plan,
    complete: int,
    bound: int | None,
) -> tuple[Form, int]:
    """Return a form with the part's codec, and the bit set of the ranks whose contributions are in the part.

    Args:
        peer: who has sent it.
        key: the part's, with its layout.
        plan: of the part's policy.
        complete: last round of the key below which all are complete here.
        bound: the policy version that the scheduler has bound the round to; None: not known yet.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    layout = key.layout
    assert layout is not None
    if not 0 <= part.chunk < layout.chunks:
        raise ProtocolViolation(f"{_name(part, key)}: the key has chunks 0 to {layout.chunks - 1}")
    # The sender may be two rounds ahead of what it has completed, and we may be one result behind it.
    if part.round > complete + 2 * ROUNDS_AHEAD:
        raise ProtocolViolation(
            f"{_name(part, key)} is more than {2 * ROUNDS_AHEAD} rounds ahead of round {complete}, "
            "the last complete one here"
        )
    if part.dtype != key.spec.dtype:
        raise ProtocolViolation(f"{_name(part, key)} is {part.dtype}; the key is {key.spec.dtype}")
    form = UndeterminedForm() if part.codec == UNDETERMINED_FORM else key.forms.get(part.codec)
    if form is None:
        raise ProtocolViolation(f"{_name(part, key)} has codec {part.codec}, which this key never has")
    if bound is not None and bound != part.version:
        raise ProtocolViolation(
            f"{_name(part, key)} names policy {part.version}; the round runs under {bound}"
        )
    contributors = _check_sender(peer, part, key, plan, plan.tree_of(layout.slots[part.chunk]))
    if payload is not None:
        start, end = layout.bounds[part.chunk]
        problem = form.problem(payload, end - start, contributors)
        if problem is not None:
            raise ProtocolViolation(f"{_name(part, key)} {problem}")
    return form, contributors


def _check_sender(peer: Peer, part: Part, key: Key, plan: Plan, tree: int) -> int:
    """Return the bit set of the part's contributors, if `peer` sends such parts in `tree`, the chunk's."""
    if part.tree != tree:
        raise ProtocolViolation(
            f"{_name(part, key)} names tree {part.tree}; under this policy it is in tree {tree}"
        )
    if part.phase is not Phase.REDUCE:
        if int(peer) != plan.broadcast_parent[tree]:
            raise ProtocolViolation(
                f"{_name(part, key)} comes from rank {peer}, not this node's parent in tree {tree}"
            )
        return plan.everybody
    if int(peer) not in plan.reduce_children[tree]:
        raise ProtocolViolation(
            f"{_name(part, key)} comes from rank {peer}, no child of this node in tree {tree}"
        )
    contributors = bits_from_wire(part.contributors)
    if contributors != plan.mask_of(tree, int(peer)):
        raise ProtocolViolation(
            f"{_name(part, key)} counts ranks {ranks_in(contributors)}, not the sender's subtree"
        )
    return contributors


def _name(part: Part, key: Key) -> str:
    return f"{part.phase.name.lower()} part of chunk {part.chunk}, round {part.round} of key {key.name!r}"
