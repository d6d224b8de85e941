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


def test_a_key_comes_back_from_its_file(tmp_path):
    assert JobKey.create(tmp_path / "job.key") == JobKey.load(tmp_path / "job.key")


def test_only_its_owner_can_read_a_new_file_whatever_the_umask_says(tmp_path):
    before = os.umask(0)
    try:
        JobKey.create(tmp_path / "job.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "job.key").stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(tmp_path):
    key = JobKey.create(tmp_path / "job.key")
    with pytest.raises(SettingsError, match="never overwritten"):
        JobKey.create(tmp_path / "job.key")
    assert JobKey.load(tmp_path / "job.key") == key


def test_a_link_is_not_followed_when_a_key_is_made(tmp_path):
    (tmp_path / "job.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="there is such a file"):
        JobKey.create(tmp_path / "job.key")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_can_read_is_refused_with_what_to_do(tmp_path, mode):
    path = tmp_path / "job.key"
    JobKey.create(path)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=rf"mode {mode:04o}.*chmod 600"):
        JobKey.load(path)


def test_a_key_may_come_through_a_pipe(tmp_path):
    key = JobKey.create(tmp_path / "job.key")
    reading, writing = os.pipe()
    try:
        os.write(writing, (tmp_path / "job.key").read_bytes())
        os.close(writing)
        assert JobKey.load(Path(f"/dev/fd/{reading}")) == key
    finally:
        os.close(reading)


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


def test_a_missing_file_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(SettingsError, match="netstorm keys new"):
        JobKey.load(tmp_path / "job.key")


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


def test_a_key_comes_back_from_its_text():
    key = CurveKeys.fresh().public
    assert key_of_text(key_text(key)) == key


@pytest.mark.parametrize("text", ["", "short", "#" * 40, "\u00e9" * 40, " " * 40])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="no key"):
        key_of_text(text)


def test_a_pipe_may_be_read_several_times_since_several_parts_of_a_process_need_the_key():
    read, write = os.pipe()
    try:
        key = JobKey.fresh()
        os.write(write, key.file_text().encode())
        os.close(write)
        path = Path(f"/dev/fd/{read}")
        assert JobKey.load(path).derive("sntp") == key.derive("sntp")
        assert JobKey.load(path).derive("sntp") == key.derive("sntp")
    finally:
        os.close(read)
