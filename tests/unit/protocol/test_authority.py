"""Who may send which message: every message has a row, and what has none nobody may send."""

from __future__ import annotations

import pytest

from netstorm.errors import NotAuthorised
from netstorm.lab.testing.decoders import message_classes
from netstorm.protocol import messages as m
from netstorm.protocol.authority import AUTHORITY, Role, check_authority, may_send

MESSAGES = set(message_classes())  # before other tests declare messages of their own


def test_every_message_has_a_row_that_says_who_may_send_it_and_what_is_checked():
    assert set(AUTHORITY) == MESSAGES
    for rights in AUTHORITY.values():
        assert rights.ways
        assert rights.checked


def test_messages_of_sessions_are_for_everybody_and_no_others():
    open_to_all = {kind for kind, rights in AUTHORITY.items() if (Role.ANYBODY, Role.ANYBODY) in rights.ways}
    assert open_to_all == {kind for kind in MESSAGES if issubclass(kind, m.SessionMessage)}


@pytest.mark.parametrize(
    ("sender", "receiver", "message"),
    [
        (Role.MEMBER, Role.MEMBER, m.PeerGone(rank=1, kind="failed", reason="")),
        (Role.MEMBER, Role.MEMBER, m.Moved(key=0, round=0, version=1, chunks=(0,))),
        (Role.MEMBER, Role.SCHEDULER, m.AllFinished()),
        (Role.APPLICANT, Role.SCHEDULER, m.Barrier(number=0)),
        (Role.SCHEDULER, Role.APPLICANT, m.AllFinished()),
        (Role.SCHEDULER, Role.MEMBER, m.Finished(last_rounds={})),
    ],
)
def test_a_message_from_the_wrong_role_is_refused_with_its_name_and_whose_it_is(sender, receiver, message):
    assert type(message) not in may_send(sender, receiver)
    with pytest.raises(NotAuthorised, match=f"rank 7 sent a {type(message).__name__}, which it may not"):
        check_authority(message, sender, receiver, "rank 7")


def test_a_move_goes_from_a_member_to_the_scheduler_and_from_there_to_members():
    moved = m.Moved(key=0, round=0, version=1, chunks=(0,))
    check_authority(moved, Role.MEMBER, Role.SCHEDULER, "rank 1")
    check_authority(moved, Role.SCHEDULER, Role.MEMBER, "the scheduler")
