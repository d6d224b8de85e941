"""When a process may do without a key, and what it has with one."""

from __future__ import annotations

import logging

import pytest

from netstorm.errors import SettingsError, UsageError
from netstorm.pslite.admission import job_key_of, load_credentials, log_if_plain, scheduler_secret_of
from netstorm.pslite.keys import JobKey, NodeKey, SchedulerKey
from netstorm.pslite.proofs import Mismatch, is_about_keys, reason_of_opener
from netstorm.settings import Settings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_no_key_is_needed(host):
    assert load_credentials(Settings(), host) is None


@pytest.mark.parametrize("host", ["10.0.0.1", "*", "", "0.0.0.0", "::", "203.0.113.7", "tokyo"])
def test_elsewhere_a_process_without_a_key_refuses_and_says_both_ways_out(host):
    with pytest.raises(SettingsError) as caught:
        load_credentials(Settings(), host)
    text = str(caught.value)
    assert "\n" not in text
    for word in ("`netstorm keys new job.key`", "NETSTORM_KEY_FILE", "NETSTORM_SECURITY=off", host or "*"):
        assert word in text
    assert load_credentials(Settings(security="off"), host) is None


def test_with_a_key_loopback_is_encrypted_too(tmp_path):
    key = JobKey.create(tmp_path / "job.key")
    settings = Settings(key_file=str(tmp_path / "job.key"))
    assert job_key_of(settings) == key
    for host in ("127.0.0.1", "*"):
        found = load_credentials(settings, host)
        assert found is not None
        assert found.job == key.curve_keys()
        assert found.own.public != key.curve_keys().public


@pytest.mark.parametrize("variable", ["key_file", "node_key_file", "scheduler_key_file", "allow_file"])
def test_a_key_contradicts_that_there_is_to_be_no_security(variable):
    with pytest.raises(SettingsError, match=r"=x with NETSTORM_SECURITY=off: expected one of them"):
        Settings.from_environment({}, security="off", **{variable: "x"})


@pytest.mark.parametrize(
    ("given", "host", "level", "says"),
    [
        ({}, "127.0.0.1", logging.INFO, "(no NETSTORM_KEY_FILE): users of this machine can read"),
        ({"security": "off"}, "127.0.0.1", logging.INFO, "(NETSTORM_SECURITY=off): users of this machine"),
        ({"security": "off"}, "*", logging.WARNING, "(NETSTORM_SECURITY=off): whoever reaches * can read"),
    ],
)
def test_plain_connections_say_that_they_are_plain(caplog, given, host, level, says):
    with caplog.at_level(logging.INFO):
        log_if_plain(Settings(**given), host, logging.getLogger("netstorm.test"))
        log_if_plain(Settings(key_file="job.key"), host, logging.getLogger("netstorm.test"))
    (record,) = caplog.records
    assert record.levelno == level
    assert says in record.getMessage()


def test_a_node_connects_with_its_own_key_and_is_reached_under_the_jobs(tmp_path):
    key = JobKey.create(tmp_path / "job.key")
    node = NodeKey.create(tmp_path / "tokyo.key", "tokyo")
    found = load_credentials(
        Settings(key_file=str(tmp_path / "job.key"), node_key_file=str(tmp_path / "tokyo.key")), "*"
    )
    assert found is not None
    assert (found.job, found.own, found.name) == (key.curve_keys(), node.keys, "tokyo")


def test_a_nodes_key_comes_back_from_its_file_and_its_name_is_checked(tmp_path):
    made = NodeKey.create(tmp_path / "a", "tokyo-1")
    assert NodeKey.load(tmp_path / "a") == made
    with pytest.raises(UsageError, match=r"--node '\.\./x': expected a name"):
        NodeKey.create(tmp_path / "b", "../x")
    with pytest.raises(SettingsError, match=r"expected a job key.*but it is a node key"):
        JobKey.load(tmp_path / "a")


@pytest.mark.parametrize("variable", ["node_key_file", "allow_file"])
def test_keys_of_nodes_need_the_jobs_key(variable):
    with pytest.raises(SettingsError, match="expected NETSTORM_KEY_FILE beside it"):
        Settings.from_environment({}, **{variable: "x"})


def test_every_reason_for_want_of_a_key_is_told_from_others():
    for mismatch in Mismatch:
        for has_key in (True, False):
            for name in ("", "tokyo"):
                text = reason_of_opener("10.0.0.1:9091", mismatch, has_key=has_key, name=name)
                assert text.startswith("10.0.0.1:9091 ")
                assert is_about_keys(text)
    assert not is_about_keys("no answer from 10.0.0.1:9091 for 10.0 s")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"standby": True}, "NETSTORM_STANDBY=1 (--standby)"),
        ({"recover_peers": "a:1"}, "NETSTORM_RECOVER_PEERS=a:1 (--recover)"),
        ({"standbys": "b:1", "elastic": "1:2"}, "NETSTORM_STANDBYS=b:1"),
        ({"recoverable": True}, "NETSTORM_RECOVERABLE=1"),
    ],
)
def test_schedulers_that_take_over_in_a_job_with_a_key_need_the_key_of_schedulers(tmp_path, given, expected):
    assert not scheduler_secret_of(Settings(**given)), "nobody can prove anything in a job without a key"
    JobKey.create(tmp_path / "job.key")
    with pytest.raises(SettingsError) as caught:
        scheduler_secret_of(Settings(key_file=str(tmp_path / "job.key"), **given))
    assert str(caught.value).startswith(expected)
    assert "`netstorm keys new --scheduler scheduler.key`" in str(caught.value)
    SchedulerKey.create(tmp_path / "scheduler.key")
    settings = Settings(
        key_file=str(tmp_path / "job.key"), scheduler_key_file=str(tmp_path / "scheduler.key"), **given
    )
    assert scheduler_secret_of(settings) == scheduler_secret_of(settings)
    assert scheduler_secret_of(settings)


def test_a_scheduler_that_nobody_takes_over_makes_a_secret_of_its_own(tmp_path):
    JobKey.create(tmp_path / "job.key")
    settings = Settings(key_file=str(tmp_path / "job.key"))
    assert scheduler_secret_of(settings) != scheduler_secret_of(settings)


def test_a_job_key_is_no_scheduler_key(tmp_path):
    JobKey.create(tmp_path / "job.key")
    path = str(tmp_path / "job.key")
    with pytest.raises(SettingsError, match=r"expected a scheduler key .* but it is a job key"):
        scheduler_secret_of(Settings(key_file=path, scheduler_key_file=path))
