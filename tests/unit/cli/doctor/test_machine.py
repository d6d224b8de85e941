"""What is wrong with one machine, by facts that are handed over."""

from __future__ import annotations

import pytest

from netstorm.cli.doctor.findings import Severity
from netstorm.cli.doctor.machine import judge_machine
from tests.unit.cli.doctor.facts import door, facts

CASES = [
    ({"python": "3.9.2"}, "error", "python", "Python 3.9.2", "3.10"),
    ({"too_old": {"pyzmq": "25.1: expected 26 or later"}}, "error", "packages", "pyzmq 25.1", "pip install"),
    ({"frameworks": {"torch": "ImportError: x"}}, "error", "torch", "ImportError: x", "pip install"),
    ({"settings_problem": "CHUNK_SIZE='x'"}, "error", "settings", "CHUNK_SIZE='x'", "netstorm env"),
    ({"settings_notes": ["NETSTORM_PROT: no"]}, "warning", "settings", "NETSTORM_PROT", "unset"),
    ({"key_problem": "k: others read it: `chmod 600 k`"}, "error", "key", "others read", "chmod 600 k"),
    ({"files_problem": ["NETSTORM_NETWORK: bad"]}, "error", "files", "NETSTORM_NETWORK", "correct"),
    ({"kernel": "4.14.0"}, "warning", "kernel", "Linux 4.14.0 lacks how much TCP", "4.18"),
    ({"tcp_info_bytes": 192}, "warning", "kernel", "lacks how much TCP", "4.18"),
    ({"memfd": False}, "warning", "kernel", "lacks memfd_create", "4.18"),
    ({"congestion": "cubic", "congestions": ["bbr"]}, "warning", "bbr", "use cubic", "sysctl -w"),
    ({"congestion": "cubic", "congestions": ["reno"]}, "warning", "bbr", "not loaded", "modprobe tcp_bbr"),
    ({"files_limit": 1024}, "warning", "open files", "1024", "ulimit"),
    ({"files_limit": 100}, "error", "open files", "at most 50 sessions", "ulimit"),
    ({"shm_bytes": 64 << 20}, "warning", "/dev/shm", "64MiB", "--shm-size"),
    ({"shm_bytes": -1}, "warning", "/dev/shm", "not there", "mount -t tmpfs"),
    ({"memory_bytes": 100 << 20}, "warning", "memory", "100MiB", "ps aux"),
    ({"name_problem": "no address for 'x'"}, "warning", "own name", "no address", "'10.0.0.1 tokyo'"),
    ({"own_name": ["127.0.1.1"], "scheduler": "tokyo"}, "warning", "own name", "127.0.1.1", "10.0.0.1"),
    ({"scheduler": "s", "scheduler_problem": "no address"}, "error", "DNS", "ROOT_URI=s", "/etc/hosts"),
    ({"scheduler": "s", "scheduler_problem": "no route to x"}, "error", "route", "no route", "ip route"),
    ({"advertised_problem": "DMLC_INTERFACE='wg9'"}, "error", "address", "wg9", "DMLC_NODE_HOST"),
    ({"clock_offset": 10.0, "scheduler": "s"}, "warning", "clock", "10 s behind", "timedatectl"),
    ({"clock_offset": -10.0, "scheduler": "s"}, "warning", "clock", "10 s ahead of", "timedatectl"),
    (
        {"doors": [door(1, scheduler=True, problem="in use: a NetStorm scheduler, process 7 (netstorm)")]},
        "error", "two schedulers", "process 7", "DMLC_PS_ROOT_PORT",
    ),
    ({"doors": [door(1, problem="Address already in use")]}, "error", "port in use", "10.0.0.1:9100", "ss"),
    (
        {"doors": [door(7, problem="Cannot assign requested address")]},
        "error", "address", "no such address (10.0.0.1)", "NETSTORM_BIND='*'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "severity", "check", "says", "do"), CASES)
def test_one_thing_that_is_wrong_is_named_with_what_to_do(changes, severity, check, says, do):
    wrong = [one for one in judge_machine(facts(**changes)) if one.severity != Severity.OK]
    assert [(one.severity.value, one.check) for one in wrong] == [(severity, check)]
    assert says in wrong[0].what
    assert do in wrong[0].do


def test_a_machine_that_is_well_has_no_findings_but_says_what_was_looked_at():
    findings = judge_machine(facts(doors=[door(1)], clock_offset=0.002, frameworks={"torch": ""}))
    assert {one.severity for one in findings} == {Severity.OK}
    assert {"packages", "torch", "settings", "kernel", "bbr", "open files", "/dev/shm", "memory", "own name",
            "IPv6", "ports", "clock"} == {one.check for one in findings}  # fmt: skip


def test_a_system_without_bbr_is_well_where_this_process_may_choose_it():
    (found,) = [
        one for one in judge_machine(facts(congestion="cubic", chooses_bbr=True)) if one.check == "bbr"
    ]
    assert (found.severity, found.what) == (
        Severity.OK, "is what NetStorm's connections use; other programs' use cubic",
    )  # fmt: skip


def test_a_loopback_name_matters_where_there_are_other_hosts_and_no_key():
    local = facts(own_name=["127.0.1.1"], secured=False)
    for alone, severity in ((True, Severity.OK), (False, Severity.WARNING)):
        (finding,) = [one for one in judge_machine(local, alone=alone) if one.check == "own name"]
        assert finding.severity == severity
