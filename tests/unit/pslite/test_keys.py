"""A job's key: its file, and what is derived from it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from netstorm.errors import SettingsError
from netstorm.pslite.admission import Credentials
from netstorm.pslite.keys import CurveKeys, JobKey, key_of_text, key_text


def test_a_key_comes_back_from_its_file_which_only_its_owner_can_read_whatever_the_umask_says(tmp_path):
    before = os.umask(0)
    try:
        key = JobKey.create(tmp_path / "job.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "job.key").stat().st_mode) == 0o600
    with pytest.raises(SettingsError, match="never overwritten"):
        JobKey.create(tmp_path / "job.key")
    assert JobKey.load(tmp_path / "job.key") == key
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="there is such a file"):
        JobKey.create(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(SettingsError, match="netstorm keys new"):
        JobKey.load(tmp_path / "elsewhere")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_can_read_is_refused_with_what_to_do(tmp_path, mode):
    path = tmp_path / "job.key"
    JobKey.create(path)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=rf"mode {mode:04o}.*chmod 600"):
        JobKey.load(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "something else"),
        ("secret", "something else"),
        ("[1]", "something else"),
        ('{"netstorm": "node key", "version": 1}', "it is a node key"),
        ('{"netstorm": "job key", "version": 2}', "version 2"),
        ('{"netstorm": "job key", "version": 1}', "no text under secret"),
        ('{"netstorm": "job key", "version": 1, "secret": 5}', "no text under secret"),
        ('{"netstorm": "job key", "version": 1, "secret": "hush-hush"}', "9 characters"),
        ('{"netstorm": "job key", "version": 1, "secret": "' + "#" * 40 + '"}', "40 characters"),
    ],
)
def test_another_file_is_refused_without_a_word_of_its_contents(tmp_path, content, reason):
    path = tmp_path / "job.key"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(SettingsError, match=reason) as caught:
        JobKey.load(path)
    assert "hush" not in str(caught.value)


def test_keys_of_two_purposes_or_two_jobs_differ():
    one, other = JobKey.fresh(), JobKey.fresh()
    assert len({one.secret, one.derive("sntp"), one.derive("curve"), other.derive("sntp")}) == 4
    assert one.derive("sntp") == JobKey(one.secret).derive("sntp")


def test_the_pair_of_a_job_is_one_that_zeromq_accepts():
    keys = JobKey.fresh().curve_keys()
    assert key_text(keys.public).encode() == zmq.curve_public(key_text(keys.secret).encode())


def test_texts_of_keys_show_no_secret():
    key = JobKey.fresh()
    keys = CurveKeys.fresh()
    shown = f"{key!r} {key} {keys!r} {keys}"
    pair = key.curve_keys()
    shown += f"{pair!r} {Credentials.of_process(key)!r}"
    # The public half of the job's pair, too: it is a part of what strangers have to guess.
    for secret in (key.secret, keys.secret, pair.secret, pair.public):
        assert repr(secret) not in shown
        assert key_text(secret) not in shown


@pytest.mark.parametrize("text", ["", "short", "#" * 40, "\u00e9" * 40, " " * 40])
def test_a_key_comes_back_from_its_text_and_what_is_none_is_refused(text):
    key = CurveKeys.fresh().public
    assert key_of_text(key_text(key)) == key
    with pytest.raises(ValueError, match="no key"):
        key_of_text(text)


def test_a_key_may_come_through_a_pipe_and_be_read_several_times_since_several_parts_need_it():
    read, write = os.pipe()
    try:
        key = JobKey.fresh()
        os.write(write, key.file_text().encode())
        os.close(write)
        assert [JobKey.load(Path(f"/dev/fd/{read}")) for _ in range(2)] == [key] * 2
    finally:
        os.close(read)
