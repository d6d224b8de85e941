"""Which files with secrets count as private."""

from __future__ import annotations

import os
import stat

import pytest

from netstorm.observe.private_files import is_readable_by_others

MINE, ROOT, MY_GROUP, FS_GROUP, OTHER_GROUP = 1000, 0, 1000, 2000, 3000


def state(mode: int, uid: int, gid: int, kind: int = stat.S_IFREG) -> os.stat_result:
    return os.stat_result((kind | mode, 1, 1, 1, uid, gid, 100, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "others"),
    [
        (0o600, MINE, MY_GROUP, False),
        (0o400, MINE, OTHER_GROUP, False),
        pytest.param(0o440, ROOT, FS_GROUP, False, id="a secret of Kubernetes with fsGroup"),
        pytest.param(0o640, ROOT, FS_GROUP, False, id="the same, as root wrote it"),
        pytest.param(0o640, ROOT, MY_GROUP, False, id="with the process's first group"),
        pytest.param(0o640, ROOT, OTHER_GROUP, True, id="with a group of others"),
        pytest.param(0o660, ROOT, FS_GROUP, True, id="that the group may change"),
        pytest.param(0o644, ROOT, FS_GROUP, True, id="that all may read"),
        pytest.param(0o604, ROOT, FS_GROUP, True, id="that all but the group may read"),
        pytest.param(0o640, MINE, FS_GROUP, True, id="of the user, who can close it"),
    ],
)
def test_a_secret_is_its_users_or_is_given_to_a_process_by_root(monkeypatch, mode, uid, gid, others):
    monkeypatch.setattr(os, "geteuid", lambda: MINE)
    monkeypatch.setattr(os, "getegid", lambda: MY_GROUP)
    monkeypatch.setattr(os, "getgroups", lambda: [FS_GROUP])
    assert is_readable_by_others(state(mode, uid, gid)) == others


def test_root_closes_its_own_files_to_others(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: ROOT)
    monkeypatch.setattr(os, "getegid", lambda: ROOT)
    monkeypatch.setattr(os, "getgroups", lambda: [ROOT])
    assert is_readable_by_others(state(0o640, ROOT, ROOT))
    assert not is_readable_by_others(state(0o600, ROOT, ROOT))


def test_a_pipe_is_not_asked():
    assert not is_readable_by_others(state(0o644, MINE, MY_GROUP, stat.S_IFIFO))
