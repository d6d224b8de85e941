"""Who cannot connect: without a key, with another one, with one that is not admitted; and what is said."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

import pytest

from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.pslite.admission import Credentials
from netstorm.pslite.keys import JobKey, NodeKey
from netstorm.pslite.proofs import is_about_keys
from netstorm.pslite.van import Broken, Connection, Received
from tests.integration.security.vans import KeyedVan, events_of, poll_all

A, B = Connection(1), Connection(2)

KEY, OTHER = JobKey.fresh(), JobKey.fresh()


def send(here: KeyedVan, port: int, text: bytes = b"hello", connection: Connection = A) -> None:
    here.van.open(connection, "127.0.0.1", port)
    here.van.transmit(connection, text, b"gradients")


def works(here: KeyedVan, there: KeyedVan, connection: Connection = B) -> None:
    before = len(events_of(there, Received))
    send(here, there.port, b"still there?", connection)
    poll_all(lambda: len(events_of(there, Received)) > before, here, there)
    received = events_of(there, Received)[-1]
    assert [bytes(frame) for frame in received.frames] == [b"still there?", b"gradients"]
    assert there.van.transmit(received.connection, b"yes", None)
    answered = len(events_of(here, Received))
    poll_all(lambda: len(events_of(here, Received)) > answered, here, there)


def test_processes_with_the_same_key_talk_in_both_directions(keyed):
    works(keyed(KEY), keyed(KEY))


def test_the_largest_message_passes_with_its_encryption(keyed):
    here, there = keyed(KEY, max_message_bytes=100_000), keyed(KEY, max_message_bytes=100_000)
    here.van.open(A, "127.0.0.1", there.port)
    payload = os.urandom(100_000)
    here.van.transmit(A, b"x", payload)
    poll_all(lambda: events_of(there, Received), here, there)
    assert bytes(events_of(there, Received)[0].frames[1]) == payload


@pytest.mark.parametrize(
    ("mine", "theirs", "said", "counted"),
    [
        pytest.param(None, KEY, "requires a key, and this process has none", "refused_no_key", id="plain"),
        pytest.param(
            KEY, None, "is not encrypted, but this process has a key", "refused_encrypted", id="reverse"
        ),
        pytest.param(OTHER, KEY, "it has another key than this process", "refused_key", id="another job's"),
    ],
)
def test_a_process_of_another_job_is_refused_by_name_and_counted(keyed, mine, theirs, said, counted):
    stranger, there, friend = keyed(mine), keyed(theirs), keyed(theirs)
    tries = itertools.count(1)
    tried = Connection(0)

    def both_know() -> bool:
        """Try again, as sessions do: of two sides either may notice first and close the connection."""
        nonlocal tried
        ends = events_of(stranger, Broken)
        if not tried or (ends and ends[-1].connection == tried):
            tried = Connection(next(tries))
            send(stranger, there.port, connection=tried)
        return any(said in end.reason for end in ends) and there.counters.get(counted) > 0

    poll_all(both_know, stranger, there)
    reason = next(end.reason for end in events_of(stranger, Broken) if said in end.reason)
    assert reason.startswith(f"127.0.0.1:{there.port} ")
    assert is_about_keys(reason)
    works(friend, there)
    assert b"hello" not in [bytes(event.frames[0]) for event in events_of(there, Received)]


def test_nothing_readable_is_on_the_wire(keyed):
    there = keyed(KEY)
    with socket.create_server(("127.0.0.1", 0)) as tap:
        here = keyed(KEY)
        here.van.open(A, "127.0.0.1", tap.getsockname()[1])
        here.van.transmit(A, b"secret header", b"secret gradients" * 100)
        ear, _ = tap.accept()
        seen = b""
        with ear, socket.create_connection(("127.0.0.1", there.port)) as on:
            ear.settimeout(0.05)
            on.settimeout(0.05)

            def relay() -> bool:
                nonlocal seen
                for source, target in ((ear, on), (on, ear)):
                    try:
                        data = source.recv(65536)
                    except TimeoutError:
                        continue
                    seen += data
                    target.sendall(data)
                return bool(events_of(there, Received))

            poll_all(relay, here, there)
    assert len(seen) > 1600
    assert b"secret" not in seen
    assert KEY.curve_keys().public not in seen, "without it nobody can even begin to talk to a process"


# ------------------------------------------------------------------------------------------------ allow list


def node(tmp_path, name: str) -> NodeKey:
    path = tmp_path / f"{name}.key"
    return NodeKey.load(path) if path.exists() else NodeKey.create(path, name)


def allow(tmp_path, *nodes: NodeKey):
    """Write the list as an editor does: a new file in the place of the old one."""
    draft, path = tmp_path / "draft", tmp_path / "allow"
    draft.write_text("# nodes\n" + "".join(f"{one.line}\n" for one in nodes))
    draft.replace(path)
    return path


def as_node(key: NodeKey, allow_file=None) -> Credentials:
    return Credentials.of_process(KEY, key, allow_file)


def test_a_node_that_is_not_in_the_list_is_refused_by_name(keyed, tmp_path, caplog):
    tokyo, paris = node(tmp_path, "tokyo"), node(tmp_path, "paris")
    there = keyed(as_node(tokyo, allow(tmp_path, tokyo)))
    here = keyed(as_node(paris))
    send(here, there.port)
    poll_all(lambda: events_of(here, Broken), here, there)
    reason = events_of(here, Broken)[0].reason
    assert "does not admit this node's own key, 'paris'," in reason
    assert is_about_keys(reason)
    assert there.counters.get("refused_not_admitted") == 1
    assert f"its key is not in {tmp_path}/allow" in caplog.text


def test_whose_key_the_sender_of_a_message_has_is_known_where_nodes_are_listed(keyed, tmp_path):
    tokyo, paris = node(tmp_path, "tokyo"), node(tmp_path, "paris")
    listed, open_to_all = keyed(as_node(tokyo, allow(tmp_path, tokyo, paris))), keyed(as_node(tokyo))
    send(keyed_paris := keyed(as_node(paris)), listed.port)
    send(holder := keyed(KEY), open_to_all.port)
    poll_all(
        lambda: events_of(listed, Received) and events_of(open_to_all, Received),
        listed,
        open_to_all,
        keyed_paris,
        holder,
    )
    assert events_of(listed, Received)[0].user == paris.line.split()[1]
    assert events_of(open_to_all, Received)[0].user == holder.user, "one that it has made itself"


def test_the_jobs_key_alone_does_not_do_where_nodes_are_listed(keyed, tmp_path):
    tokyo = node(tmp_path, "tokyo")
    there, here = keyed(as_node(tokyo, allow(tmp_path, tokyo))), keyed(KEY)
    send(here, there.port)
    poll_all(lambda: events_of(here, Broken), here, there)
    assert "has no NETSTORM_NODE_KEY" in events_of(here, Broken)[0].reason


def test_a_removed_key_is_out_at_once_and_others_go_on(keyed, tmp_path, caplog):
    tokyo, paris = node(tmp_path, "tokyo"), node(tmp_path, "paris")
    there = keyed(as_node(tokyo, allow(tmp_path, tokyo, paris)))
    good, bad = keyed(as_node(tokyo)), keyed(as_node(paris))
    works(good, there)
    works(bad, there)
    connection = events_of(there, Received)[-1].connection
    allow(tmp_path, tokyo)
    poll_all(lambda: events_of(there, Broken) and events_of(bad, Broken), there, good, bad, seconds=5)
    assert events_of(there, Broken) == [
        Broken(connection, "the key of paris was removed (NETSTORM_ALLOW)", expelled=True)
    ]
    assert "added: none; removed: paris" in caplog.text
    assert not events_of(good, Broken)
    works(good, there, Connection(7))
    send(bad, there.port, connection=Connection(8))
    poll_all(lambda: len(events_of(bad, Broken)) == 2, there, bad)
    assert "does not admit" in events_of(bad, Broken)[1].reason


def test_a_key_that_is_added_is_admitted_at_once(keyed, tmp_path, caplog):
    tokyo, paris = node(tmp_path, "tokyo"), node(tmp_path, "paris")
    there, here = keyed(as_node(tokyo, allow(tmp_path, tokyo))), keyed(as_node(paris))
    send(here, there.port)
    poll_all(lambda: events_of(here, Broken), here, there)
    allow(tmp_path, tokyo, paris)
    poll_all(lambda: "added: paris" in caplog.text, there)
    works(here, there)


def test_a_list_that_is_half_written_ends_nothing(keyed, tmp_path, caplog):
    tokyo = node(tmp_path, "tokyo")
    there, here = keyed(as_node(tokyo, allow(tmp_path, tokyo))), keyed(as_node(tokyo))
    (tmp_path / "allow").write_text("tokyo")
    poll_all(lambda: "stays in force" in caplog.text, there)
    works(here, there)


# ------------------------------------------------------------------------------------------ strangers' bytes


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, os.urandom(500)], ids=["http", "zeros", "noise"]
)
def test_other_protocols_on_the_port_come_to_nothing(keyed, words):
    there, friend = keyed(KEY), keyed(KEY)
    with socket.create_connection(("127.0.0.1", there.port)) as one:
        one.sendall(words)
        with contextlib.suppress(OSError):  # it may be closed by now
            one.shutdown(socket.SHUT_WR)
            one.settimeout(10)
            while one.recv(4096):
                pass
    works(friend, there)
    poll_all(lambda: there.counters.get("established_connections"), there)
    assert there.counters.get("accepted_connections") == 2
    assert there.counters.get("established_connections") == 1


def recorded(keyed, there: KeyedVan) -> bytes:
    """Return all bytes that a process of the job has sent on one connection."""
    sent = b""
    with TcpProxy("127.0.0.1", there.port) as proxy:
        here = keyed(KEY)

        def note(data: bytes) -> bool:
            nonlocal sent
            sent += data
            return False

        proxy.refuses = note
        send(here, proxy.port)
        poll_all(lambda: events_of(there, Received), here, there)
    return sent


@pytest.mark.parametrize("same_process", [True, False], ids=["same process", "next job of the same key"])
def test_recorded_traffic_is_refused(keyed, same_process):
    there = keyed(KEY)
    sent = recorded(keyed, there)
    assert len(sent) > 300
    victim = there if same_process else keyed(KEY)
    victim.events.clear()
    with socket.create_connection(("127.0.0.1", victim.port)) as replayer:
        replayer.sendall(sent)
        poll_all(lambda: victim.counters.get("refused_protocol"), victim)
    assert not events_of(victim, Received)
    works(keyed(KEY), victim)
