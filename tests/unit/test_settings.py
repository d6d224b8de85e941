from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from netstorm.errors import SettingsError, UsageError
from netstorm.settings import (
    Settings,
    child_environment,
    declarations,
    foreign_variable,
    set_for_children,
)
from netstorm.settings.values import WITHOUT_EFFECT, describe, notes, unknown_variables

ROOT = Path(__file__).parents[2]
VARIABLES = [declaration.variable for declaration in declarations().values()]


def test_the_defaults_are_those_of_the_design():
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert (settings.role, settings.scheduler_host, settings.scheduler_port) == ("worker", "127.0.0.1", 9091)
    assert (settings.chunk_size, settings.max_message_bytes) == (32_768, 64 * 2**20)
    assert (settings.heartbeat_interval_s, settings.heartbeat_timeout_s) == (1, 10)
    assert (settings.update_time_s, settings.primary_busy_bound, settings.auxiliary_queue_length) == (5, 2, 1)
    assert (settings.probe_chunk_num, settings.num_roots, settings.topology) == (4, 0, "auto")


def test_no_two_settings_share_a_variable():
    assert len(set(VARIABLES)) == len(VARIABLES)


def test_new_variables_begin_with_netstorm_and_old_names_are_kept():
    old = {variable for variable in VARIABLES if not variable.startswith("NETSTORM_")}
    assert old == {
        *("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"),
        *("DMLC_NODE_HOST", "DMLC_INTERFACE", "PS_VERBOSE", "PS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_TIMEOUT"),
        *("ENABLE_DGT", "DMLC_K", "DMLC_K_MIN", "ADAPTIVE_K_FLAG", "DMLC_UDP_CHANNEL_NUM"),
        *("DGT_BLOCK_SIZE", "DGT_CONTRIBUTION_ALPHA", "DGT_INFO"),
        "MXNET_KVSTORE_SIZE_LOWER_BOUND",
        *("MXNET_KVSTORE_USE_HFA", "MXNET_KVSTORE_HFA_K1", "MXNET_KVSTORE_HFA_K2"),
        *(
            "ENABLE_AWARENESS",
            "ENABLE_AUX_PATH",
            "UPDATE_RATE",
            "UPDATE_TIME",
            "CHUNK_SIZE",
            "NUM_ROOT_SERVERS",
        ),
        *("PRIMARY_BUSY_BOUND", "AUXILIARY_QUEUE_LENGTH", "PROBE_CHUNK_SIZE", "PROBE_CHUNK_NUM"),
    }


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DMLC_ROLE", "scheduler", "role", "scheduler"),
        ("DMLC_ROLE", "Worker", "role", "worker"),
        ("DMLC_PS_ROOT_URI", "fe80::1%eth0", "scheduler_host", "fe80::1%eth0"),
        ("DMLC_PS_ROOT_PORT", " 9092 ", "scheduler_port", 9092),
        ("ENABLE_AUX_PATH", "off", "aux_path", False),
        ("UPDATE_RATE", "10%", "update_rate", 0.1),
        ("UPDATE_RATE", "0.25", "update_rate", 0.25),
        ("UPDATE_TIME", "250ms", "update_time_s", 0.25),
        ("UPDATE_TIME", "3", "update_time_s", 3.0),
        ("UPDATE_TIME", "3min", "update_time_s", 180.0),
        ("NETSTORM_WINDOW", "16MB", "window_bytes", 16_000_000),
        ("NETSTORM_WINDOW", "4MiB", "window_bytes", 4 * 2**20),
        ("NETSTORM_WINDOW", "4096", "window_bytes", 4096),
        ("NETSTORM_BIND", "*", "bind_host", "*"),
        ("NETSTORM_NETWORK", "my networks/wan 1.yaml", "network_file", "my networks/wan 1.yaml"),
        ("NETSTORM_SITE", "zürich", "site", "zürich"),
        ("NETSTORM_LOG", "INFO", "log_level", "info"),
        ("NETSTORM_TORCH_BACKENDS", "gloo,nccl", "torch_backends", "gloo,nccl"),
    ],
)
def test_a_variable_is_read(variable, text, name, value):
    settings = Settings.from_environment({variable: text})
    assert getattr(settings, name) == value
    assert settings.source(name) == "environment"


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("DMLC_ROLE", "boss", "one of worker, scheduler, server"),
        ("DMLC_PS_ROOT_PORT", "70000", "a whole number from 1 to 65535"),
        ("DMLC_PS_ROOT_PORT", "0", "a whole number from 1 to 65535"),
        ("DMLC_PS_ROOT_PORT", "9e3", "a whole number from 1 to 65535"),
        ("DMLC_PS_ROOT_URI", "tcp://10.0.0.1", "without scheme or port"),
        ("DMLC_PS_ROOT_URI", "10.0.0.1:9091", "without scheme or port"),
        ("DMLC_NUM_WORKER", "1_000", "a whole number"),
        ("DMLC_NUM_WORKER", "٣", "a whole number"),
        ("DMLC_NUM_WORKER", "-1", "at least 1"),
        ("PS_HEARTBEAT_INTERVAL", "0", "more than 0"),
        ("PS_HEARTBEAT_INTERVAL", "nan", "a duration"),
        ("PS_HEARTBEAT_INTERVAL", "1e999", "a duration"),
        ("PS_HEARTBEAT_INTERVAL", "5 parsecs", "a duration"),
        ("PS_VERBOSE", "3", "from 0 to 2"),
        ("ENABLE_AWARENESS", "maybe", "1 or 0"),
        ("UPDATE_RATE", "1.5", "from 0 to 1"),
        ("CHUNK_SIZE", "0", "at least 1"),
        ("NETSTORM_RANK", "-2", "at least -1"),
        ("NETSTORM_SITE", "new york", "without spaces"),
        ("NETSTORM_JOB", "a/b", "letters, digits"),
        ("NETSTORM_MAX_MESSAGE", "1kB", "at least 64KiB"),
        ("NETSTORM_WINDOW", "1.5B", "a size such as"),
        ("NETSTORM_SWITCH_INTERVAL", "2s", "at most 1s"),
        ("NETSTORM_TOPOLOGY", "rings", "one of star, sharded, "),
        ("NETSTORM_TORCH_BACKENDS", "gloo, mpi", "a list such as gloo,mpi"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_variable_value_and_what_is_allowed(variable, text, allowed):
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment({variable: text})
    assert str(raised.value).startswith(f"{variable}={text!r}: expected ")
    assert allowed in str(raised.value)


@given(st.sampled_from(VARIABLES), st.text(max_size=12))
def test_any_text_is_read_or_refused_with_its_name(variable, text):
    try:
        Settings.from_environment({variable: text})
    except SettingsError as error:
        assert variable in str(error)


def test_all_wrong_values_are_reported_together():
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment({"DMLC_ROLE": "boss", "CHUNK_SIZE": "many"}, rank=-9, colour="blue")
    message = str(raised.value)
    assert message.startswith("4 settings are wrong:\n")
    for part in (
        "DMLC_ROLE='boss'",
        "CHUNK_SIZE='many'",
        "rank=-9 (an argument, for NETSTORM_RANK)",
        "colour: ",
    ):
        assert part in message


def test_an_argument_wins_over_a_variable_even_a_wrong_one():
    settings = Settings.from_environment({"CHUNK_SIZE": "many"}, chunk_size=100)
    assert settings.chunk_size == 100
    assert settings.source("chunk_size") == "argument"


def test_an_argument_may_be_text_and_none_means_not_given():
    settings = Settings.from_environment({"CHUNK_SIZE": "7"}, window_bytes="1MiB", chunk_size=None)
    assert (settings.window_bytes, settings.chunk_size) == (2**20, 7)
    assert settings.source("chunk_size") == "environment"


def test_an_empty_variable_counts_as_not_set():
    settings = Settings.from_environment({"DMLC_PS_ROOT_PORT": "", "NETSTORM_RANK": "  "})
    assert settings == Settings()
    assert settings.source("scheduler_port") == "default"


@pytest.mark.parametrize("value", [True, 1.0, None, "7", 0])
def test_settings_made_without_the_environment_are_checked_too(value):
    with pytest.raises(SettingsError, match=r"CHUNK_SIZE\): expected a whole number"):
        Settings(chunk_size=value)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"PS_HEARTBEAT_TIMEOUT": "1.5"}, "PS_HEARTBEAT_TIMEOUT=1.5: expected at least twice"),
        ({"NETSTORM_RANK": "2", "DMLC_NUM_WORKER": "2"}, "NETSTORM_RANK=2: expected a rank from 0 to 1"),
        ({"NETSTORM_HUB": "2", "DMLC_NUM_WORKER": "2"}, "NETSTORM_HUB=2: expected a rank from 0 to 1"),
        (
            {"NUM_ROOT_SERVERS": "3", "DMLC_NUM_WORKER": "2"},
            "NUM_ROOT_SERVERS=3: expected at most one root a node",
        ),
        ({"PROBE_CHUNK_SIZE": "131073"}, "PROBE_CHUNK_SIZE=131073: expected at most 131072 bytes"),
        ({"NETSTORM_MAX_MESSAGE": "200000"}, "NETSTORM_MAX_MESSAGE=200000: expected at least 262144 bytes"),
    ],
)
def test_values_that_contradict_each_other_are_an_error(environ, reason):
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment(environ)
    assert reason in str(raised.value)


def test_an_unknown_variable_is_a_warning_with_the_name_that_was_meant(caplog):
    with caplog.at_level(logging.WARNING, logger="netstorm"):
        Settings.from_environment({"NETSTORM_RNAK": "3", "NETSTORM_QQQQQ": "", "OTHER": "x"})
    assert [record.getMessage() for record in caplog.records] == [
        "NETSTORM_RNAK: there is no setting of that name (variable); did you mean NETSTORM_RANK?",
        "NETSTORM_QQQQQ: there is no setting of that name (variable); `netstorm env` lists all settings",
    ]


def test_misspelled_names_of_mxnets_and_the_papers_settings_are_warned_about_and_other_programs_are_not():
    meant = {"ENABLE_AWARENES": "ENABLE_AWARENESS", "DMLC_PS_ROOT_URL": "DMLC_PS_ROOT_URI"}
    meant["PS_VERBOS"] = "PS_VERBOSE"
    assert unknown_variables(["PS_FORMAT", "ENABLE_IPV6", "DMLC_TRACKER_URI", *meant]) == [
        f"{name}: there is no setting of that name (variable); did you mean {setting}?"
        for name, setting in meant.items()
    ]


def test_variables_that_do_nothing_here_are_named_with_what_does_their_job_and_are_those_of_the_guides():
    assert unknown_variables(
        ["ENABLE_INTRA_TS", "ENABLE_INTER_TS", "MXNET_KVSTORE_BIGARRAY_BOUND", "DMLC_NUM_SERVER"]
    ) == [
        f"{names}: without effect here; {instead}"
        for names, instead in (
            ("ENABLE_INTER_TS, ENABLE_INTRA_TS", "trees follow what nodes measure (ENABLE_AWARENESS)"),
            (
                "MXNET_KVSTORE_BIGARRAY_BOUND",
                "keys are cut into chunks (CHUNK_SIZE), and higher priorities go first on every link",
            ),
        )
    ]
    rows = [
        row
        for page in ("moving-from-dist-sync", "geomx")
        for row in (ROOT / f"docs/guides/{page}.md").read_text().splitlines()
        if re.search(r"^\| .* \| (not read|not needed|no effect) \|", row)
    ]
    named = set(re.findall(r"`([A-Z0-9_]+)`", " ".join(row.split("|")[1] for row in rows)))
    assert named - {"PORT"} == WITHOUT_EFFECT  # many programs have one of that name


def test_asking_for_servers_gets_a_note():
    (note,) = notes(Settings(num_servers=2), {})
    assert note.startswith("DMLC_NUM_SERVER=2 is ignored")
    assert notes(Settings(), {}) == []


@st.composite
def settings_of_any_kind(draw: st.DrawFn) -> Settings:
    workers = draw(st.integers(1, 50))
    interval = draw(st.floats(1e-6, 1e3))
    chunk = draw(st.integers(1, 10**6))
    return Settings(
        role=draw(st.sampled_from(["worker", "scheduler", "server"])),
        num_workers=workers,
        rank=draw(st.integers(-1, workers - 1)),
        num_roots=draw(st.integers(0, workers)),
        scheduler_host=draw(st.sampled_from(["localhost", "10.1.2.3", "::1", "a-b.example"])),
        heartbeat_interval_s=interval,
        heartbeat_timeout_s=interval * draw(st.floats(2, 100)),
        update_rate=draw(st.floats(0, 1)),
        chunk_size=chunk,
        max_message_bytes=max(65_536, chunk * 8),
        aux_path=draw(st.booleans()),
        site=draw(st.from_regex(r"[a-zß]{0,10}", fullmatch=True)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(settings_of_any_kind())
def test_a_child_process_gets_the_same_settings_through_variables(settings):
    assert Settings.from_environment(settings.as_variables()) == settings
    assert Settings.from_environment(child_environment({}, **settings.as_variables())) == settings


@given(settings_of_any_kind(), st.integers(1, 1000))
def test_a_change_changes_nothing_else_and_keeps_where_the_rest_came_from(settings, chunk_size):
    assume(chunk_size * 8 <= settings.max_message_bytes)
    original = Settings.from_environment(settings.as_variables())
    changed = original.changed(chunk_size=chunk_size)
    assert changed.chunk_size == chunk_size
    assert changed.source("chunk_size") == "argument"
    for name in declarations().keys() - {"chunk_size"}:
        assert getattr(changed, name) == getattr(original, name)
        assert changed.source(name) == original.source(name)


def test_the_papers_preset_is_its_table_and_what_a_user_gives_wins():
    paper = Settings.from_environment({"NETSTORM_PRESET": "paper", "NUM_NODES": "9"})
    assert (paper.num_workers, paper.num_roots, paper.chunk_size) == (9, 0, 1_000_000)
    assert (paper.primary_busy_bound, paper.auxiliary_queue_length, paper.update_time_s) == (2, 1, 5)
    assert (paper.probe_chunk_size, paper.probe_chunk_num, paper.update_rate) == (2_000_000, 4, 0)
    assert (paper.topology, paper.freeze_roots, paper.source("topology")) == ("fapt", True, "preset")
    assert "paper" in notes(paper, {})[0]
    given = {"NETSTORM_PRESET": "paper", "CHUNK_SIZE": "32768", "NETSTORM_TOPOLOGY": "mst"}
    mine = Settings.from_environment(given, update_rate=0.1, num_workers=2)
    assert (mine.chunk_size, mine.largest_chunk, mine.probe_chunk_size) == (32_768, 32_768, 65_536)
    assert (mine.topology, mine.freeze_roots, mine.update_rate) == ("mst", False, 0.1)
    assert Settings.from_environment(mine.as_variables()) == mine
    assert mine.changed(rank=1).source("estimator") == "preset"
    assert Settings.from_environment({"NUM_NODES": "9"}).num_workers == 1


def test_the_papers_sizes_of_chunks_fit_each_other():
    settings = Settings.from_environment({"CHUNK_SIZE": "1000000", "PROBE_CHUNK_SIZE": "2000000"})
    assert (settings.chunk_size, settings.probe_chunk_size) == (1_000_000, 2_000_000)


def test_a_wrong_change_is_refused():
    with pytest.raises(SettingsError, match=r"rank=5|NETSTORM_RANK=5"):
        Settings(num_workers=3).changed(rank=5)


def test_every_row_says_what_it_means_and_where_its_value_came_from():
    rows = {row.name: row for row in describe(Settings.from_environment({"CHUNK_SIZE": "9"}, rank=0))}
    assert list(rows) == list(declarations())
    assert all(row.meaning and row.allowed for row in rows.values())
    chunk = rows["chunk_size"]
    assert (chunk.variable, chunk.value, chunk.source, chunk.default) == (
        "CHUNK_SIZE",
        9,
        "environment",
        32_768,
    )
    assert (rows["rank"].source, rows["seed"].source) == ("argument", "default")


def test_every_default_is_allowed_and_reads_back_from_text():
    for name, declaration in declarations().items():
        assert declaration.kind.fits(declaration.default), name
        assert declaration.kind.read(declaration.kind.write(declaration.default)) == declaration.default, name


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        Settings().rank = 3  # type: ignore[misc]


def test_settings_can_be_sent_to_a_worker_process():
    settings = Settings.from_environment({"CHUNK_SIZE": "9"})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_environment_of_this_process_is_read_by_default(monkeypatch):
    monkeypatch.setenv("DMLC_NUM_WORKER", "4")
    assert Settings.from_environment().num_workers == 4


def test_a_childs_environment_is_a_changed_copy(monkeypatch):
    monkeypatch.setenv("NETSTORM_SITE", "denver")
    monkeypatch.setenv("HOME", "/home/me")
    environment = child_environment(
        NETSTORM_RANK=3, DMLC_NUM_WORKER="4", ENABLE_AUX_PATH=False, NETSTORM_SITE=None
    )
    assert environment["NETSTORM_RANK"] == "3"
    assert environment["ENABLE_AUX_PATH"] == "0"
    assert environment["HOME"] == "/home/me"
    assert "NETSTORM_SITE" not in environment


def test_what_is_set_for_children_is_set_here(monkeypatch):
    monkeypatch.setenv("NETSTORM_SITE", "here")
    monkeypatch.setenv("CHUNK_SIZE", "7")
    set_for_children(NETSTORM_SITE=None, CHUNK_SIZE=9)
    assert "NETSTORM_SITE" not in os.environ
    assert os.environ["CHUNK_SIZE"] == "9"
    with pytest.raises(SettingsError, match="CHUNK_SIZE=0"):
        set_for_children(CHUNK_SIZE=0)
    assert os.environ["CHUNK_SIZE"] == "9"


def test_a_child_is_not_started_with_settings_that_it_would_refuse():
    with pytest.raises(SettingsError, match="2 settings are wrong") as raised:
        child_environment({}, NETSTORM_RNK=3, CHUNK_SIZE="many")
    assert "did you mean NETSTORM_RANK?" in str(raised.value)
    assert "CHUNK_SIZE='many'" in str(raised.value)


def test_variables_of_other_programs_are_read_only_if_the_reason_is_written_down(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert foreign_variable("OMP_NUM_THREADS") == "2"
    with pytest.raises(UsageError, match="declare it there"):
        foreign_variable("HOME")


def test_further_hosts_of_the_scheduler_are_its_standbys():
    listed = Settings.from_environment(
        {"DMLC_PS_ROOT_URI": "a, b,c:7000", "DMLC_PS_ROOT_PORT": "9100", "NETSTORM_ELASTIC": "1:3"}
    )
    assert (listed.scheduler_host, listed.scheduler_port) == ("a", 9100)
    assert listed.standby_addresses == (("b", 9100), ("c", 7000))
    more = {"DMLC_PS_ROOT_URI": "a:9000,b", "NETSTORM_STANDBYS": "d:1", "NETSTORM_ELASTIC": "1:3"}
    both = Settings.from_environment(more)
    assert (both.scheduler_port, both.standbys) == (9000, "b:9091,d:1")
    ipv6 = {"DMLC_PS_ROOT_URI": "2001:db8::1, [2001:db8::2],[2001:db8::3]:7", "NETSTORM_ELASTIC": "1:3"}
    found = Settings.from_environment(ipv6)
    assert (found.scheduler_host, found.scheduler_port) == ("2001:db8::1", 9091)
    assert found.standby_addresses == (("2001:db8::2", 9091), ("2001:db8::3", 7))
    with pytest.raises(SettingsError, match=r"NETSTORM_STANDBYS='b c:9091'"):
        Settings.from_environment({"DMLC_PS_ROOT_URI": "a,b c", "NETSTORM_ELASTIC": "1:3"})
