"""Checks of received parts: each must agree with what the scheduler has fixed. Pure."""

from __future__ import annotations

import math

from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.kvstore.rounds.round import Round, has_sent
from netstorm.kvstore.values.collective import Collective
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.undetermined import UndeterminedForm
from netstorm.protocol.chunks import UNDETERMINED_FORM
from netstorm.protocol.collectives import ELEMENT_BYTES
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer, bits_from_wire, ranks_in
from netstorm.protocol.messages import Part, Phase
from netstorm.topology.policy import Plan

__all__ = ["check_part", "check_result", "check_sum_is_in"]


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
    form = _form(part, key, plan)
    layout = key.layout_of(form)
    if not 0 <= part.chunk < layout.chunks:
        raise ProtocolViolation(f"{_name(part, key)}: the key has chunks 0 to {layout.chunks - 1}")
    # The sender may be so far ahead of what it has completed, and we may be one result behind it.
    ahead = 2 * key.rounds_under_way
    if part.round > complete + ahead:
        raise ProtocolViolation(
            f"{_name(part, key)} is more than {ahead} rounds ahead of round {complete}, "
            "the last complete one here"
        )
    if part.dtype != key.spec.dtype:
        raise ProtocolViolation(f"{_name(part, key)} is {part.dtype}; the key is {key.spec.dtype}")
    if bound is not None and bound != part.version:
        raise ProtocolViolation(
            f"{_name(part, key)} names policy {part.version}; the round runs under {bound}"
        )
    if part.loss is not None and not (0 < part.loss.bound < 1 and 0 < part.loss.deadline_s < math.inf):
        raise ProtocolViolation(
            f"{_name(part, key)} has loss bound {part.loss.bound} and deadline {part.loss.deadline_s}: "
            "expected a bound between 0 and 1, and a deadline of more than 0 s"
        )
    if not -1 <= part.settled < max(0, part.round):
        raise ProtocolViolation(
            f"{_name(part, key)} says that round {part.settled} is complete everywhere: expected -1 or an "
            "earlier round"
        )
    contributors = _check_sender(peer, part, key, plan, plan.tree_of(layout.slots[part.chunk]))
    _check_payload(part, payload, key, form, contributors)
    return form, contributors


def check_result(part: Part, payload: Buffer | None, key: Key, plan: Plan) -> tuple[Form, int]:
    """Return the form and the contributors, as `check_part` does, of a result that comes outside the trees.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    form, contributors = _form(part, key, plan), bits_from_wire(part.contributors)
    if not 0 <= part.chunk < key.layout_of(form).chunks or part.dtype != key.spec.dtype or not contributors:
        raise ProtocolViolation(f"{_name(part, key)}, of {part.dtype}, is none that this key can have")
    if contributors >> plan.policy.size:
        raise ProtocolViolation(f"{_name(part, key)} counts ranks that the job does not have")
    _check_payload(part, payload, key, form, contributors)
    return form, contributors


def check_sum_is_in(peer: Peer, part: Part, round: Round) -> None:
    """Check that a result from a tree's parent can have the sum that this node sends to its parent.

    Raises:
        NotAuthorised: that sum has not been sent, so the result was made up.
    """
    plan = round.plan_of(part.chunk)
    expected = plan.expected[part.tree] if part.loss is None else 0
    if expected and not has_sent(round, part.chunk):
        raise NotAuthorised(
            f"{_name(part, round.key)} comes from rank {peer} before rank {plan.rank} has sent its sum of "
            f"ranks {ranks_in(expected)}: nobody can have it"
        )


def _check_payload(part: Part, payload: Buffer | None, key: Key, form: Form, contributors: int) -> None:
    if payload is not None:
        start, end = key.layout_of(form).bounds[part.chunk]
        problem = form.problem(payload, end - start, contributors)
        if problem is not None:
            raise ProtocolViolation(f"{_name(part, key)} {problem}")


def _form(part: Part, key: Key, plan: Plan) -> Form:
    """Return a form with the part's codec."""
    if part.codec == UNDETERMINED_FORM and not key.is_collective:
        return UndeterminedForm()
    form = key.form_of(part.codec)
    if form is None:
        raise ProtocolViolation(f"{_name(part, key)} has codec {part.codec}, which this key never has")
    if isinstance(form, Collective):
        segments, size = form.signature.segments, form.signature.segment_bytes
        if segments > plan.ranks or segments * size > key.elements * ELEMENT_BYTES:
            raise ProtocolViolation(
                f"{_name(part, key)} has {segments} segments of {size} bytes; the key has "
                f"{key.elements * ELEMENT_BYTES} bytes in all, and {plan.ranks} members"
            )
    return form


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
        return _check_contributors(part, key, plan.everybody)
    if int(peer) not in plan.reduce_children[tree]:
        raise ProtocolViolation(
            f"{_name(part, key)} comes from rank {peer}, no child of this node in tree {tree}"
        )
    return _check_contributors(part, key, plan.mask_of(tree, int(peer)))


def _check_contributors(part: Part, key: Key, expected: int) -> int:
    """Return the bit set of the part's contributors: all that are expected, or some if a round may end
    without the others.
    """
    contributors = bits_from_wire(part.contributors)
    some = part.loss is not None and contributors and not contributors & ~expected
    if contributors != expected and not some:
        whose = "the sender's subtree" if part.phase is Phase.REDUCE else "all ranks of the policy"
        raise ProtocolViolation(f"{_name(part, key)} counts ranks {ranks_in(contributors)}, not {whose}")
    return contributors


def _name(part: Part, key: Key) -> str:
    return f"{part.phase.name.lower()} part of chunk {part.chunk}, round {part.round} of key {key.name!r}"
