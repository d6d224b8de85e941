"""When a process may do without a key, and what it has with one."""

from __future__ import annotations

import logging
import os
import resource

import pytest

from netstorm.errors import SettingsError, UsageError
from netstorm.pslite.admission import (
    PROOF_BYTES,
    Admission,
    Credentials,
    ProcessProof,
    job_key_of,
    load_credentials,
    log_if_plain,
    parse_allow_list,
    scheduler_secret_of,
)
from netstorm.pslite.keys import CurveKeys, JobKey, NodeKey, SchedulerKey, key_text
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


# ------------------------------------------------------------------------------------ whose key is admitted


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


# ----------------------------------------------------------------------------------------------------


TEXTS = [key_text(CurveKeys.fresh().public) for _ in range(2)]


def test_comments_and_empty_lines_are_left_out():
    text = f"# nodes\n\n  tokyo {TEXTS[0]}\nparis\t{TEXTS[1]}\n"
    assert sorted(parse_allow_list(text, "allow").values()) == ["paris", "tokyo"]
    assert not parse_allow_list("", "allow")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tokyo", "1 words: expected NAME PUBLICKEY"),
        (f"tokyo {TEXTS[0]} # mine", "4 words"),
        ("tokyo abc", "3 characters that are no key"),
        (f"to/kyo {TEXTS[0]}", "'to/kyo': expected a name"),
        (f"rome {TEXTS[1]}", "rome or its key is there twice"),
        (f"paris {TEXTS[0]}", "paris or its key is there twice"),
    ],
    ids=range(6),  # not the keys, which are other ones in each process
)
def test_a_wrong_line_is_named_with_its_number(line, message):
    with pytest.raises(SettingsError) as caught:
        parse_allow_list(f"\nparis {TEXTS[1]}\n{line}\n", "allow")
    assert str(caught.value).startswith(f"allow, line 3: {message}")


# --------------------------------------------------------- a proof holds for one key pair and one job's key


FIXED = JobKey(bytes(range(32)))
OWN, OTHERS = (CurveKeys.from_secret(bytes([number] * 32)).public for number in (1, 2))


def test_a_holder_of_the_jobs_key_proves_it_for_each_connection_anew_and_nobody_else_does():
    here, there = ProcessProof(FIXED), ProcessProof(FIXED)
    proofs = {here.fresh(OWN) for _ in range(20)}
    assert len(proofs) == 20
    for proof in proofs:
        assert len(proof) == PROOF_BYTES
        assert there.is_valid(proof, OWN)
        assert not there.is_valid(proof, OTHERS)
    assert not there.is_valid(ProcessProof(JobKey.fresh()).fresh(OWN), OWN)


@pytest.mark.parametrize("place", range(0, PROOF_BYTES, 3))
def test_no_byte_of_it_can_be_changed(place):
    proof = bytearray(ProcessProof(FIXED).fresh(OWN))
    proof[place] ^= 1
    assert not ProcessProof(FIXED).is_valid(bytes(proof), OWN)


@pytest.mark.parametrize("size", [0, 8, PROOF_BYTES - 1, PROOF_BYTES + 1])
def test_it_has_one_size(size):
    proof = (ProcessProof(FIXED).fresh(OWN) + b"\0")[:size]
    assert not ProcessProof(FIXED).is_valid(proof, OWN)


def test_it_does_not_say_the_key_from_which_it_is_made():
    assert FIXED.derive("processes") not in ProcessProof(FIXED).fresh(OWN)
    assert FIXED.derive("processes") not in {FIXED.derive("curve"), FIXED.derive("sntp"), FIXED.secret}
