"""Whose key is admitted: the job's, or those of a list that may change."""

from __future__ import annotations

import os
import resource

import pytest

from netstorm.errors import SettingsError
from netstorm.pslite.admission import Admission, Credentials
from netstorm.pslite.keys import CurveKeys, JobKey, NodeKey, key_text

KEY = JobKey.fresh()
TOKYO, PARIS = NodeKey("tokyo", CurveKeys.fresh()), NodeKey("paris", CurveKeys.fresh())


def listed(path, *nodes):
    path.write_text("".join(f"{node.line}\n" for node in nodes))
    os.utime(
        path, ns=(0, path.stat().st_mtime_ns + 1_000_000 * len(nodes))
    )  # whatever the clock's resolution
    return Credentials.of_process(KEY, TOKYO, path)


def test_without_a_list_every_key_is_admitted_since_whose_it_is_is_proved_with_the_first_message():
    admission = Admission(Credentials.of_process(KEY))
    assert not admission.can_change
    assert admission.refresh() == {}
    for key in (CurveKeys.fresh().public, TOKYO.keys.public):
        assert admission.decide(key).user == key_text(key)
        assert admission.admits(key_text(key))


def test_with_a_list_its_nodes_are_admitted_and_no_others(tmp_path):
    admission = Admission(listed(tmp_path / "allow", TOKYO))
    assert admission.decide(TOKYO.keys.public).user == key_text(TOKYO.keys.public)
    assert "is not in" in admission.decide(PARIS.keys.public).reason
    for key in (KEY.curve_keys().public, CurveKeys.fresh().public):
        assert "or it has none of its own" in admission.decide(key).reason


def test_a_list_that_changes_names_those_who_were_removed(tmp_path):
    path = tmp_path / "allow"
    admission = Admission(listed(path, TOKYO, PARIS))
    assert admission.refresh() == {}
    listed(path, TOKYO)
    user = key_text(PARIS.keys.public)
    assert admission.admits(user)
    assert admission.refresh() == {user: "paris"}
    assert not admission.admits(user)
    assert admission.refresh() == {}
    listed(path, TOKYO, PARIS)
    assert admission.refresh() == {}
    assert admission.admits(user)


def test_a_name_with_a_new_key_is_another_user(tmp_path):
    path = tmp_path / "allow"
    admission = Admission(listed(path, PARIS))
    listed(path, NodeKey("paris", CurveKeys.fresh()), TOKYO)
    assert admission.refresh() == {key_text(PARIS.keys.public): "paris"}


def test_a_list_that_cannot_be_read_any_more_removes_nobody_and_is_reported_once(tmp_path, caplog):
    path = tmp_path / "allow"
    admission = Admission(listed(path, PARIS))
    path.unlink()
    assert admission.refresh() == admission.refresh() == {}
    assert admission.decide(PARIS.keys.public).user
    assert caplog.text.count("stays in force") == 1
    listed(path, TOKYO, NodeKey("rome", CurveKeys.fresh()))
    assert admission.refresh() == {key_text(PARIS.keys.public): "paris"}


def test_a_list_that_is_wrong_at_the_start_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match=r"NETSTORM_ALLOW=.*/allow: cannot read the allow list"):
        Admission(Credentials.of_process(KEY, TOKYO, tmp_path / "allow"))
    listed(tmp_path / "allow", TOKYO)
    (tmp_path / "allow").chmod(0o666)
    with pytest.raises(SettingsError, match="mode 0666 lets everybody add keys"):
        Admission(Credentials.of_process(KEY, TOKYO, tmp_path / "allow"))


def test_a_removal_is_not_lost_because_the_file_could_not_be_read_when_it_changed(tmp_path, caplog):
    path = tmp_path / "allow"
    admission = Admission(listed(path, TOKYO, PARIS))
    listed(path, TOKYO)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # as if somebody had taken all descriptors
    try:
        assert admission.refresh() == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "stays in force" in caplog.text
    assert admission.refresh() == {key_text(PARIS.keys.public): "paris"}


def test_a_change_counts_even_if_the_file_looks_as_before(tmp_path):
    path = tmp_path / "allow"
    admission = Admission(listed(path, PARIS))
    before = path.stat()
    with path.open("r+") as file:
        file.write(NodeKey("paris", CurveKeys.fresh()).line)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert admission.refresh() == {key_text(PARIS.keys.public): "paris"}
