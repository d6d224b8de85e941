"""Handles of members, and the views that they make."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.errors import NotAuthorised, SettingsError, Unreachable, UsageError
from netstorm.frontends.torch.reconfigure import Handle, encode_handle, view_of
from netstorm.pslite.keys import JobKey

KEY = JobKey(b"k" * 32)


def text(name: str, *, machine: int = 1, address: str = "127.0.0.1", key: JobKey | None = None) -> str:
    handle = Handle(identity=name, machine=machine, host=f"host-{name}", pid=7, address=address, port=4711)
    return encode_handle(handle, key)


A, B, C = text("a"), text("b"), text("c")


def test_ranks_are_the_places_of_the_handles_and_the_scheduler_is_the_firsts():
    view = view_of(5, [C, A, B], A, None)
    assert [member.identity for member in view.members] == ["c", "a", "b"]
    assert (view.rank, view.uuid, view.members[0].port) == (1, 5, 4711)
    assert "rank 0: process 7 of host host-c, at 127.0.0.1:4711" in str(view)


def test_handles_in_a_set_have_the_same_order_at_all_members():
    views = [view_of(5, {A, B, C}, own, None) for own in (A, B, C)]
    assert len({view.members for view in views}) == 1
    assert sorted(view.rank for view in views) == [0, 1, 2]


def test_members_that_were_told_different_things_meet_in_no_job():
    told = [view_of(5, handles, A, None) for handles in ([A, B], [B, A], [A, C], [A, B, C])]
    assert len({view.job for view in [*told, view_of(6, [A, B], A, None)]}) == 5
    assert view_of(5, [A, B], B, None).job == told[0].job


@pytest.mark.parametrize(
    ("handles", "expected"),
    [
        ([], "no handles: expected one of each member"),
        ([A, B, A], "handle of process 7 of host host-a, at 127.0.0.1:4711 twice"),
        ([B, C], "handles of 2 members, and this process's is not among them"),
        (
            [A, "gloo:0:1:0:localhost:29500"],
            "'gloo:0:1:0:localhost:29500': expected what .*_get_reconfigure_handle",
        ),
        ([A, "netstorm:AAAA"], "'netstorm:AAAA': expected"),
        ([A, "netstorm"], "'netstorm': expected"),
        ([A, A[:-8]], "expected what"),
    ],
)
def test_wrong_handles_are_refused_with_what_was_expected(handles, expected):
    with pytest.raises(UsageError, match=expected):
        view_of(1, handles, A, None)


def test_a_handle_of_somebody_without_the_key_is_refused():
    own = text("a", key=KEY)
    assert view_of(1, [own, text("b", key=KEY)], own, KEY).rank == 0
    for other in (B, text("b", key=JobKey(b"x" * 32))):
        with pytest.raises(NotAuthorised, match="NETSTORM_KEY_FILE"):
            view_of(1, [own, other], own, KEY)
    with pytest.raises(SettingsError, match="NETSTORM_KEY_FILE"):
        view_of(1, [A, own], A, None)


def test_members_of_several_machines_are_told_that_they_need_a_key():
    far = text("b", machine=2)
    expected = r"host-a.* on its own machine alone, and .*host-b.* NETSTORM_KEY_FILE"
    for own in (A, far):
        with pytest.raises(Unreachable, match=expected):
            view_of(1, [A, far], own, None)
    assert view_of(1, [text("a", address="10.0.0.1"), far], far, None).rank == 1
