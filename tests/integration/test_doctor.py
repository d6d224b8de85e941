"""`netstorm doctor` on real sockets: through ssh's stand-in, and against strangers at its ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from netstorm.cli.doctor.facts import gather
from netstorm.cli.doctor.probes import Doctor, try_port
from netstorm.cli.doctor.wire import (
    BULK_BYTES,
    MAGIC,
    Ask,
    DoctorMessage,
    Done,
    NotDone,
    ProbeTarget,
    Sink,
    Wire,
    datagram_probe,
    key_of,
)
from netstorm.errors import NotAuthorised, PeerError
from netstorm.pslite.keys import JobKey
from netstorm.topology.files import load_network
from tests.integration.forking import ROOT
from tests.integration.jobs import free_port, run_netstorm

FAKE_SSH = f"{sys.executable} {Path(__file__).with_name('launch') / 'fake_ssh.py'}"
LIMIT_S = 30


def examine(folder: Path, text: str, *words: str, **variables: str):
    (folder / "hosts").write_text(text)
    how = ("--quick", "--hosts", "hosts", "--ssh", FAKE_SSH, "--python", sys.executable)
    return run_netstorm(folder, "doctor", *how, *words, PYTHONPATH=str(ROOT), **variables)


def test_hosts_of_a_host_file_are_examined_through_ssh_and_a_network_file_is_written(tmp_path):
    ended = examine(tmp_path, "localhost site=a slots=2\ntokyo site=b\n", "--json", "--write", "net.yaml")
    document = json.loads(ended.out)
    assert ended.code == any(one["severity"] != "ok" for one in document["findings"]), ended.text
    assert [host["name"] for host in document["hosts"]] == ["localhost", "tokyo"]
    assert document["hosts"][0]["facts"]["doors"][0]["scheduler"]
    pairs = {(host["name"], pair["to"]) for host in document["hosts"] for pair in host["pairs"]}
    assert pairs == {("localhost", "localhost"), ("localhost", "tokyo"), ("tokyo", "localhost")}
    assert all(pair["problem"] == "" for host in document["hosts"] for pair in host["pairs"]), document
    network = load_network(tmp_path / "net.yaml")
    assert [node.site for node in network.nodes] == ["a", "a", "b"]
    assert len(network.links) == 6
    assert all(link.rate > 1e6 and 0 < link.latency < 1 for link in network.links)
    assert "measuring rates, step 2 of 2" in ended.err


def test_a_host_that_ssh_does_not_reach_and_one_without_netstorm_are_named_and_the_others_examined(tmp_path):
    ended = examine(tmp_path, "localhost\nunreachable\n")
    assert ended.code == 1
    assert "error: unreachable: host: no doctor there: ssh: connect to host unreachable" in ended.out
    ended = examine(tmp_path, "localhost\n", "--python", "/no/such/python")
    assert ended.code == 1
    assert "error: localhost: host: no doctor there" in ended.out


def test_a_key_file_that_cannot_be_used_is_said_before_any_host_is_asked(tmp_path):
    ended = examine(tmp_path, "localhost\n", NETSTORM_KEY_FILE="/no/such.key")
    assert (ended.code, ended.out) == (2, "")
    assert "/no/such.key: cannot read the job key" in ended.err


def test_a_doctor_whom_others_could_reach_needs_a_key_or_to_be_told_that_it_may(tmp_path):
    variables = {"NETSTORM_BIND": "*", "DMLC_NODE_HOST": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    ended = run_netstorm(tmp_path, "doctor", "--quick", "--serve", **variables)
    assert ended.code == 2
    assert "needs a key, since others can reach it: set NETSTORM_KEY_FILE" in ended.err
    ended = run_netstorm(
        tmp_path, "doctor", "--quick", "--serve", "--insecure", "--serve-for", "0.1", **variables
    )
    assert ended.code == 0, ended.err
    assert "listening at" in ended.err
    assert "other hosts cannot reach it there: set DMLC_PS_ROOT_URI" in ended.err


def test_ctrl_c_ends_a_doctor_that_serves_and_one_that_waits_for_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LIMIT_S)
        peers = f"127.0.0.1:{silent.getsockname()[1]}"
        for words, code in ((["--serve"], 0), (["--peers", peers, "--timeout", "60"], 130)):
            process = subprocess.Popen(
                [sys.executable, "-m", "netstorm", "doctor", "--quick", *words],
                stderr=subprocess.PIPE,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port())},
            )
            with process:
                assert process.stderr is not None
                assert b"netstorm doctor" in process.stderr.readline()
                with silent.accept()[0] if "--peers" in words else contextlib.nullcontext():
                    process.send_signal(signal.SIGINT)
                    assert process.wait(LIMIT_S) == code


# ------------------------------------------------------------------------ logs of jobs that have failed

FAILS = """
import os, signal
if os.environ["NETSTORM_RANK"] == "1":
    {}
from netstorm.kvstore.process.runtime import runtime_of_this_process
runtime_of_this_process()
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "raise ValueError('bad sample 17')",
            "the script raised an exception: ValueError: bad sample 17, at ",
        ),
        ("import foo_missing", "a package is missing: ModuleNotFoundError: No module named 'foo_missing'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "a process was killed: by the kernel, for want of memory"),
        ("os._exit(3)", "a process has failed: failed with exit code 3"),
    ],
)
def test_the_logs_of_a_real_job_name_the_rank_that_failed_first_and_why(tmp_path, how, says):
    (tmp_path / "train.py").write_text(FAILS.format(how))
    words = ("--log-dir", "logs", "--", sys.executable, "train.py")
    assert run_netstorm(tmp_path, "launch", "-n", "2", *words, PYTHONPATH=str(ROOT)).code != 0
    (tmp_path / "launch.log").write_text((tmp_path / "netstorm.err").read_text())
    for logs in ("logs", "launch.log"):
        ended = run_netstorm(tmp_path, "doctor", logs)
        assert ended.code == 1
        assert ended.out.startswith("error: rank 1 on 127.0.0.1: first cause: "), (logs, ended.out)
        assert says in ended.out, (logs, ended.out)


# ------------------------------------------------------------------------------------- strangers at the ports


def with_doctor(tmp_path: Path, act: Callable[[Doctor, tuple[str, int]], Awaitable[None]]) -> None:
    """Run `act` beside a doctor of a job that has a key, on loopback."""
    JobKey.create(tmp_path / "job.key")
    variables = {"NETSTORM_KEY_FILE": str(tmp_path / "job.key"), "DMLC_PS_ROOT_PORT": str(free_port())}

    async def run() -> None:
        gathered = await asyncio.to_thread(gather, variables, frameworks=False)
        async with Doctor(*gathered) as doctor:
            (door,) = [door for door in doctor.facts.doors if not door.scheduler]
            await act(doctor, ("127.0.0.1", door.port))

    asyncio.run(asyncio.wait_for(run(), 2 * LIMIT_S))


async def is_well(doctor: Doctor, address: tuple[str, int]) -> bool:
    """Return whether a doctor answers one with its key."""
    target = ProbeTarget(rank=0, identity=doctor.facts.identity, host=address[0], port=address[1], bulk=True)
    result = await try_port(target, doctor.key)
    return result.problem == "" and result.udp is True and result.stalls is False


async def greeted(address: tuple[str, int], key: bytes) -> Wire:
    wire = Wire(*await asyncio.open_connection(*address), key=key, is_server=False)
    try:
        await wire.greet()
    except BaseException:
        wire.close()
        raise
    return wire


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\0\0\0\0\0\0\0\1\x7f",
        MAGIC,
        MAGIC + b"\0" * 15,
        os.urandom(1000),
    ],
    ids=["nothing", "http", "zeromq", "half a greeting", "most of one", "noise"],
)
def test_a_stranger_s_connection_keeps_nobody_waiting(tmp_path, said):
    async def act(doctor: Doctor, address: tuple[str, int]) -> None:
        strangers = [await asyncio.open_connection(*address) for _ in range(20)]
        for _, writer in strangers:
            writer.write(said)
        assert await is_well(doctor, address)
        for _, writer in strangers:
            writer.close()

    with_doctor(tmp_path, act)


def test_a_doctor_tells_nothing_to_who_has_another_key_or_none(tmp_path):
    async def act(doctor: Doctor, address: tuple[str, int]) -> None:
        for key in (key_of(JobKey.fresh()), b""):
            with pytest.raises(NotAuthorised):
                await greeted(address, key)
        liar = await greeted(address, doctor.key)
        liar._session = b"\1" * 32  # it repeats another's greeting, and does not have the key
        with pytest.raises((EOFError, OSError)):
            await liar.ask(Ask(), Done, LIMIT_S)
        liar.close()
        assert await is_well(doctor, address)

    with_doctor(tmp_path, act)


def test_a_frame_that_comes_twice_is_refused(tmp_path):
    async def act(doctor: Doctor, address: tuple[str, int]) -> None:
        wire = await greeted(address, doctor.key)
        await wire.ask(Ask(), Done, LIMIT_S)
        wire._sent = 0
        with pytest.raises((EOFError, OSError)):
            await wire.ask(Ask(), Done, LIMIT_S)
        wire.close()

    with_doctor(tmp_path, act)


def test_a_member_cannot_make_a_doctor_take_more_than_its_bounds(tmp_path):
    async def act(doctor: Doctor, address: tuple[str, int]) -> None:
        wire = await greeted(address, doctor.key)
        for refused in (Sink(size=BULK_BYTES + 1), Sink(size=0), NotDone(text="x")):
            with pytest.raises(PeerError, match="is nothing that this doctor does"):
                await wire.ask(refused, Done, LIMIT_S)
        wire.writer.write((1 << 31).to_bytes(4, "big") + bytes(16))  # a frame of 2 GB
        assert await wire.reader.read() == b""
        wire.close()
        wire = await greeted(address, doctor.key)
        body = msgspec.msgpack.encode({"is": "probe", "targets": "all"})
        wire.writer.write(len(body).to_bytes(4, "big") + wire._code(body, 0, by_server=False) + body)
        assert await wire.reader.read() == b""
        wire.close()
        assert await is_well(doctor, address)

    with_doctor(tmp_path, act)


def test_a_datagram_without_the_key_has_no_answer(tmp_path):
    async def act(doctor: Doctor, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.connect(address)
            for wrong in (b"", bytes(100), datagram_probe(b"other", bytes(8), 100)):
                client.send(wrong)
            right = datagram_probe(doctor.key, bytes(8), 100)
            client.send(right)
            answer = await asyncio.wait_for(loop.sock_recv(client, 2048), LIMIT_S)
            assert answer.startswith(b"NSD!")
            assert len(answer) < len(right)
            with pytest.raises(BlockingIOError):
                client.recv(2048)

    with_doctor(tmp_path, act)


@pytest.mark.parametrize(
    ("said", "words"),
    [(b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0"), (b"\xff\0\0\0\0\0\0\0\1\x7f", "as a running job does")],
    ids=["ssh", "zeromq"],
)
def test_what_else_listens_at_a_port_is_named(tmp_path, said, words):
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    async def act(doctor: Doctor, address: tuple[str, int]) -> None:
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        result = await try_port(ProbeTarget(rank=0, identity="", host="127.0.0.1", port=port), doctor.key)
        assert (result.problem, words in result.text) == ("stranger", True), result
        server.close()

    with_doctor(tmp_path, act)


def test_messages_have_distinct_names():
    names = [kind.__struct_config__.tag for kind in DoctorMessage.__subclasses__()]
    assert len(names) == len(set(names)) == 10
