"""The lock of the registry of emulated networks."""

from __future__ import annotations

import fcntl
import os
import stat

import pytest

from netstorm.lab.emulation import namespaces as registry


@pytest.mark.timeout(30)
def test_whoever_can_read_its_folder_cannot_hold_up_those_who_use_the_registry(monkeypatch, tmp_path):
    """All users can open /run, and lock it."""
    monkeypatch.setattr(registry, "_LOCK", tmp_path / "netstorm-wan.lock")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        for _ in range(2):
            with registry.registry_lock():
                pass
    finally:
        os.close(folder)
    assert registry._LOCK.parent == tmp_path
    assert stat.S_IMODE(registry._LOCK.stat().st_mode) == 0o600, "who cannot open it cannot lock it"


def test_two_users_of_the_registry_take_turns(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_LOCK", tmp_path / "netstorm-wan.lock")
    with registry.registry_lock():
        other = os.open(registry._LOCK, os.O_RDWR)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
