"""Payloads by reference come as they were, in bounded memory, and nothing is left of them."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.addresses import is_address
from netstorm.kvstore.forms import Dense
from netstorm.lab.testing.conformance import VanConformance
from netstorm.observe.log import Counters
from netstorm.protocol.frames import StagedValues, constant_payload
from netstorm.protocol.messages import SharedMemory
from netstorm.pslite import shared_memory
from netstorm.pslite.host_addresses import is_own_address
from netstorm.pslite.shared_memory import SharedPayloads
from netstorm.pslite.van import Connection, Received
from netstorm.pslite.zeromq import ZmqVan
from tests.integration.forking import ROOT
from tests.integration.pslite.test_zmq_van_conformance import ProxiedWorld

A, B = Connection(1), Connection(2)
HERE = Connection(-7)
"""How the reader numbers the connection."""
KB = 2**10
LEASES = 8192
SIZE, MOST = 8 * 2**20, 4 * 2**20
"""Bytes of the memory, and of the largest payload."""
Bytes = Any
"""An array of bytes, or None: the payload is to go over the connection."""


class TestZmqVanWithSharedMemory(VanConformance):
    """Of a pair of vans one has shared its memory with the other."""

    @pytest.fixture
    def world(self):
        world = ProxiedWorld()
        yield world
        world.close()

    def pair(self, world):
        here, there = super().pair(world)
        here.transmit(A, b"", None)  # the other side numbers a connection when it hears of it
        [message] = self.messages(world, there, 1, here)
        assert isinstance(here, ZmqVan)
        assert isinstance(there, ZmqVan)
        offered = here.memory.lend(A)
        assert offered is not None
        assert there.memory.borrow(message.connection, offered)
        here.memory.share(A)
        return here, there


def bytes_of(payload: object) -> Bytes:
    """Return a received payload as an array of bytes."""
    assert isinstance(payload, memoryview)
    return np.frombuffer(payload, np.uint8)


class Pair:
    """Who owns memory, and who reads it, in one process."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.owner = SharedPayloads(self.counters, most_bytes=MOST, nbytes=SIZE, staging_bytes=SIZE)
        self.reader = SharedPayloads(Counters(), most_bytes=MOST)
        self.connect(A, HERE)

    def connect(self, connection: Connection, there: Connection) -> None:
        offered = self.owner.lend(connection)
        assert offered is not None
        assert self.reader.borrow(there, offered)
        self.owner.share(connection)

    def give(self, values: object, connection: Connection = A, there: Connection = HERE) -> Bytes:
        """Return what the reader gets."""
        reference = self.owner.reference(connection, values)
        return None if reference is None else bytes_of(self.reader.payload(there, reference))

    def close(self) -> None:
        self.owner.close()
        self.reader.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def values_of(number: int, nbytes: int = 32 * KB) -> Bytes:
    return np.full(nbytes, number, np.uint8)


def test_memory_is_used_again_once_readers_drop_what_they_have_and_not_before(pair):
    kept: list[Bytes] = []
    while (payload := pair.give(values_of(len(kept) % 251))) is not None:
        kept.append(payload)
    assert pair.counters.snapshot() == {"payloads_in_shared_memory": len(kept), "payloads_without_memory": 1}
    assert 200 < len(kept) < 256  # a bound, and then payloads go over the connection
    assert all((payload == number % 251).all() for number, payload in enumerate(kept))
    views = [np.frombuffer(payload, np.float32)[10:] for payload in kept[::2]]
    kept[:] = kept[1::2]  # views of the others still use their memory
    assert pair.give(values_of(255)) is None
    del views[50:]
    again = [pair.give(values_of(255)) for _ in range(len(views))]
    assert all(payload is not None for payload in again[:40])
    assert all((payload == (2 * place + 1) % 251).all() for place, payload in enumerate(kept))
    assert all((np.frombuffer(view, np.uint8) == 2 * place % 251).all() for place, view in enumerate(views))


def test_rounds_without_end_need_the_same_few_pages(pair):
    places = set()
    for number in range(5000):
        payload = pair.give(values_of(number % 256, 65536))
        assert payload is not None
        assert payload[0] == payload[-1] == number % 256
        places.add(payload.__array_interface__["data"][0])
        del payload
    assert len(places) <= 2


@given(st.lists(st.tuples(st.integers(17_000, MOST), st.integers(0, 9), st.integers(0, 3)), max_size=40))
@settings(max_examples=40)
def test_no_two_payloads_under_way_share_memory_whatever_their_sizes(steps):
    """Each step gives a payload of some size, or makes one there, given or not, and drops another."""
    pair, kept, payload = Pair(), dict[int, tuple[int, Bytes]](), None
    for number, (nbytes, dropped, way) in enumerate(steps):
        kept.pop(dropped, None)
        if way < 2:
            payload = pair.give(values_of(number, nbytes))
        elif (payload := pair.owner.room(nbytes)) is not None:
            np.frombuffer(payload, np.uint8)[:] = number
            payload = pair.give(constant_payload(payload)) if way == 2 else np.frombuffer(payload, np.uint8)
        if payload is not None:
            kept[number % 10] = number, payload
    for number, payload in kept.values():
        assert payload[0] == payload[-1] == payload[len(payload) // 2] == number
    kept.clear()
    payload = None
    whole = [pair.give(values_of(1, 2_000_000)) for _ in range(4)]
    assert all(one is not None for one in whole), "free places do not join again"
    whole.clear()
    pair.close()


def test_without_a_lease_a_payload_goes_over_the_connection_and_its_memory_is_not_lost(pair):
    constant = constant_payload(values_of(3))
    kept = [pair.give(constant) for _ in range(LEASES)]  # all at one place
    assert all(one is not None for one in kept)
    for number in range(2 * SIZE // len(values_of(0))):
        assert pair.give(values_of(number % 256)) is None
    kept.clear()
    whole = [pair.give(values_of(1, 2_000_000)) for _ in range(3)]
    assert all(one is not None for one in whole)


def test_a_constant_payload_lies_at_one_place_for_all_and_nobody_can_change_it(pair):
    pair.connect(B, Connection(-8))
    constant = constant_payload(values_of(7))
    first, second = pair.give(constant), pair.give(constant, B, Connection(-8))
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(first, np.uint8)[0] = 1
    where = [np.frombuffer(one, np.uint8).__array_interface__["data"][0] for one in (first, second)]
    other = pair.give(constant_payload(values_of(8)))
    assert np.frombuffer(second, np.uint8)[-1] == 7
    # Two mappings of one place: a write through one is seen through the other.
    writable = np.frombuffer(pair.reader._borrowed[HERE].map, np.uint8)
    offset = where[0] - writable.__array_interface__["data"][0]
    writable[offset] = 99
    assert np.frombuffer(second, np.uint8)[0] == 99
    assert np.frombuffer(other, np.uint8)[0] == 8


class Middle(Pair):
    """A pair whose reader adds to what it gets, and gives the sum to two others."""

    def __init__(self) -> None:
        super().__init__()
        self.below = SharedPayloads(Counters(), most_bytes=MOST)
        for connection, there in ((A, HERE), (B, Connection(-8))):
            offered = self.reader.lend(connection)
            assert offered is not None
            assert self.below.borrow(there, offered)
            self.reader.share(connection)

    def lend(self, value: float) -> Any:
        return self.reader.payload(HERE, self.owner.reference(A, np.full(8 * KB, value, np.float32)))

    def sum_of(self, lent: object, own: Bytes) -> object:
        total = Dense(np.dtype(np.float32)).new_sum()
        total.add_own(own, 1)
        total.add_received(lent, 2)
        total.add_received(np.full(len(own), 4, np.float32).data, 4)
        return constant_payload(total.to_keep())

    def close(self) -> None:
        super().close()
        self.below.close()


@pytest.fixture
def middle() -> Iterator[Middle]:
    middle = Middle()
    yield middle
    middle.close()


def test_a_sum_with_a_lent_payload_lies_in_the_readers_own_memory_and_is_not_copied(middle):
    lent = middle.lend(1)
    total = middle.sum_of(lent, np.full(8 * KB, 2, np.float32))
    assert (np.frombuffer(lent, np.float32) == 1).all(), "it has been written to"
    got = [
        bytes_of(middle.below.payload(there, middle.reader.reference(connection, total)))
        for connection, there in ((A, HERE), (B, Connection(-8)))
    ]
    assert all((one.view(np.float32) == 7).all() for one in got)
    with pytest.raises(ValueError, match="read-only"):
        got[0][0] = 1
    place = np.frombuffer(middle.reader._own._map, np.uint8).__array_interface__["data"][0]
    where = np.frombuffer(total, np.uint8).__array_interface__["data"][0] - place
    maps = [middle.below._borrowed[there].map for there in (HERE, Connection(-8))]
    starts = [np.frombuffer(one, np.uint8).__array_interface__["data"][0] for one in maps]
    assert {one.__array_interface__["data"][0] for one in got} == {start + where for start in starts}


def test_the_place_of_a_sum_is_used_again_once_neither_it_nor_a_reader_needs_it(middle):
    own = np.full(8 * KB, 2, np.float32)
    lent = middle.lend(1)
    places = set()
    for _ in range(300):
        total = middle.sum_of(lent, own)
        got = bytes_of(middle.below.payload(HERE, middle.reader.reference(A, total)))
        del total  # a reader still has it
        other = middle.sum_of(lent, np.full(8 * KB, 20, np.float32))
        assert (got.view(np.float32) == 7).all()
        places.add(np.frombuffer(other, np.uint8).__array_interface__["data"][0])
        del got, other
    assert len(places) <= 3


def test_sums_take_half_of_the_memory_at_most_and_then_lie_where_the_payload_does(middle):
    middle.reader._own._payloads.size = 256 * KB  # as if it were so small
    own = np.full(8 * KB, 2, np.float32)
    kept = [middle.sum_of(middle.lend(1), own) for _ in range(4)]
    lent = middle.lend(1)
    assert (np.frombuffer(middle.sum_of(lent, own), np.float32) == 7).all()
    assert (np.frombuffer(lent, np.float32) == 7).all()
    del kept[0]
    lent = middle.lend(1)
    assert (np.frombuffer(middle.sum_of(lent, own), np.float32) == 7).all()
    assert (np.frombuffer(lent, np.float32) == 1).all()


def staged(memory: Any, number: int) -> Bytes:
    """Return values in a staging buffer, all the same."""
    values = np.frombuffer(memory, np.uint8).view(StagedValues)
    values[:] = number
    return values


def test_staged_values_are_read_where_they_lie_and_by_readers_only_read(pair):
    values = staged(pair.owner.staging(64 * KB), 5)
    payload = pair.give(values[16 * KB : 40 * KB])
    assert len(payload) == 24 * KB
    values[20 * KB] = 99
    assert payload[4 * KB] == 99, "it is a copy"
    with pytest.raises(ValueError, match="read-only"):
        payload[0] = 1
    elsewhere = pair.give(values.copy())
    values[:] = 7
    assert (elsewhere[:100] == 5).all()
    assert pair.owner.staging(1000) is None, "a copy costs less"


def test_a_staging_buffer_is_used_again_once_neither_its_owner_nor_a_reader_has_it(pair):
    values = [staged(pair.owner.staging(2**20), number) for number in range(SIZE // 2**20)]
    assert pair.owner.staging(2**20) is None
    payloads = [pair.give(one) for one in values]
    values.clear()
    assert pair.owner.staging(2**20) is None
    assert [int(payload[-1]) for payload in payloads] == list(range(SIZE // 2**20))
    del payloads[::2]
    kept = [staged(pair.owner.staging(2**20), 200) for _ in range(SIZE // 2**21)]
    assert pair.owner.staging(2**20) is None
    assert all((payload == 2 * place + 1).all() for place, payload in enumerate(payloads))
    payloads.clear()
    kept.clear()
    pair.give(values_of(1))  # leases have ended, which is noticed now
    assert pair.owner.staging(SIZE) is not None, "free places do not join again"


def test_where_addresses_are_limited_there_are_no_staging_buffers_but_payloads_go_by_reference():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    owner = SharedPayloads(Counters(), most_bytes=MOST)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    try:
        assert owner.staging(2**20) is None
        assert owner.lend(A) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    owner.close()


def test_a_core_dump_leaves_the_memory_out(pair):
    mappings = Path("/proc/self/smaps").read_text().split("/memfd:netstorm")[1:]
    assert len(mappings) >= 2
    assert all(" dd " in next(line for line in one.splitlines() if "VmFlags" in line) for one in mappings)


def test_a_sum_with_staged_values_is_no_staging_buffer(middle):
    values = staged(middle.owner.staging(32 * KB), 0).view(np.float32)
    values[:] = 1
    lent = middle.reader.payload(HERE, middle.owner.reference(A, values.view(StagedValues)))
    own = np.full(8 * KB, 2, np.float32)
    kept = [middle.sum_of(lent, own)]
    middle.reader._own._payloads.size = 0
    kept.append(middle.sum_of(lent, own))
    alone = Dense(np.dtype(np.float32)).new_sum()
    alone.add_received(lent, 2)
    assert alone.to_send() is lent, "who forwards it needs no copy"
    kept.append(alone.to_keep())
    values[:] = 50
    assert [np.frombuffer(one, np.float32)[9] for one in kept] == [7, 7, 1]


def test_who_lends_nothing_has_no_room_for_sums(pair):
    assert pair.reader.room(32 * KB) is None


def test_what_may_change_is_copied_for_each(pair):
    values = values_of(1)
    first = pair.give(values)
    values[:] = 2
    second = pair.give(values)
    np.frombuffer(first, np.uint8)[:] = 3
    assert (second == 2).all()


def test_small_payloads_and_those_of_other_connections_go_themselves(pair):
    assert pair.owner.reference(A, values_of(1, 1000)) is None
    assert pair.owner.reference(B, values_of(1)) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": b"x" * 16},
        {"nbytes": 4096},
        {"descriptor": 0},
        {"descriptor": 99_999},
        {"process": 2**22 + 1},
        {"process": -1},
        {"nbytes": 2**64 - 1},
        {"number": 2**63},
        {"number": 0},
    ],
)
def test_memory_that_is_not_what_it_should_be_is_not_mapped(pair, wrong):
    offered = pair.owner.lend(B)
    assert not pair.reader.borrow(Connection(-9), msgspec.structs.replace(offered, **wrong))


def test_a_file_of_the_same_name_that_its_owner_could_shrink_is_not_mapped(pair):
    descriptor = os.memfd_create("netstorm")
    os.ftruncate(descriptor, 2**20)
    os.pwrite(descriptor, b"t" * 16, 0)
    offered = SharedMemory(
        process=os.getpid(), descriptor=descriptor, nbytes=2**20, token=b"t" * 16, number=1
    )
    assert not pair.reader.borrow(Connection(-9), offered)
    os.close(descriptor)


def sealed_memory(nbytes: int) -> SharedMemory:
    """Make memory as a process has it, of any size; nothing of it exists yet."""
    descriptor = os.memfd_create("netstorm", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.pwrite(descriptor, b"t" * 16, 0)
    return SharedMemory(process=os.getpid(), descriptor=descriptor, nbytes=nbytes, token=b"t" * 16, number=1)


def test_peers_do_not_take_all_addresses_of_a_process(pair, monkeypatch):
    """By one memory of 70 TB, or by many that payloads keep."""
    huge, usual = sealed_memory(2**46), sealed_memory(2**20)
    assert not pair.reader.borrow(Connection(-9), huge)
    monkeypatch.setattr(shared_memory, "_MOST_MAPPED", 8)
    kept = []
    for number in range(7):  # beside the pair's own
        assert pair.reader.borrow(Connection(-10 - number), usual)
        kept.append(
            pair.reader.payload(Connection(-10 - number), struct.pack("<QQI?", 2**16, 4096, 1, False))
        )
        pair.reader.closed(Connection(-10 - number))
    assert not pair.reader.borrow(Connection(-9), usual)
    kept.clear()
    assert pair.reader.borrow(Connection(-9), usual)
    for made in (huge, usual):
        os.close(made.descriptor)


def test_references_to_what_is_not_there_are_refused(pair):
    reference = pair.owner.reference(A, values_of(1))
    offset, nbytes = np.frombuffer(reference[:16], "<u8")
    lease, constant = reference[16:20], b"\0"
    for begin, size in (
        (0, 100),
        (offset, 2**60),
        (2**63, 100),
        (offset, 0),
        (2 * SIZE - 5, 10),
        (offset, MOST + 1),
    ):
        wrong = np.array([begin, size], "<u8").tobytes() + lease + constant
        assert pair.reader.payload(HERE, wrong) is None
    for number in (0, 2**31):
        wrong = np.array([offset, nbytes], "<u8").tobytes() + np.array([number], "<u4").tobytes() + constant
        assert pair.reader.payload(HERE, wrong) is None
    assert pair.reader.payload(HERE, reference[:-1]) is None
    assert pair.reader.payload(Connection(-99), reference) is None
    assert (bytes_of(pair.reader.payload(HERE, reference)) == 1).all()


READER = """
import sys
import msgspec
from netstorm.observe.log import Counters
from netstorm.protocol.messages import SharedMemory
from netstorm.pslite import shared_memory
from netstorm.pslite.host_addresses import is_own_address
from netstorm.pslite.shared_memory import SharedPayloads
reader = SharedPayloads(Counters(), most_bytes=2**26)
assert reader.borrow(-7, msgspec.json.decode(sys.stdin.readline().encode(), type=SharedMemory))
print("mapped", flush=True)
kept = []
for line in sys.stdin:
    kept.append(reader.payload(-7, bytes.fromhex(line)))
    print(int(kept[-1][-1]), flush=True)
"""


class Reader:
    """Another process that reads, and keeps all that it gets."""

    def __init__(self, owner: SharedPayloads) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        offered = owner.lend(B)
        assert self.ask(msgspec.json.encode(offered).decode()) == "mapped"
        owner.share(B)

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def test_what_a_process_had_that_was_killed_comes_back_and_what_a_stopped_one_has_does_not(pair):
    reader = Reader(pair.owner)
    for number in range(200):
        assert reader.ask(pair.owner.reference(B, values_of(number)).hex()) == str(number)
    os.kill(reader.process.pid, signal.SIGSTOP)
    pair.owner.closed(B)
    kept = []
    while (payload := pair.give(values_of(255))) is not None:
        kept.append(payload)
    assert len(kept) < 60  # of 256 MB: the stopped one has the rest
    with reader.process:
        reader.process.kill()
    more = [pair.give(values_of(254)) for _ in range(150)]
    assert all((payload == 254).all() for payload in more)
    assert all((payload == 255).all() for payload in kept)


def test_a_staging_buffer_that_a_killed_process_read_is_used_again_and_that_of_a_stopped_one_is_not(pair):
    reader = Reader(pair.owner)
    values = staged(pair.owner.staging(SIZE), 9)
    assert reader.ask(pair.owner.reference(B, values[: 32 * KB]).hex()) == "9"
    os.kill(reader.process.pid, signal.SIGSTOP)
    pair.owner.closed(B)
    del values
    assert pair.owner.staging(32 * KB) is None
    with reader.process:
        reader.process.kill()
    assert pair.owner.staging(SIZE) is not None


def test_a_killed_owner_leaves_nothing_and_its_readers_keep_what_they_have():
    program = """
import sys
import msgspec, numpy as np
from netstorm.observe.log import Counters
from netstorm.pslite import shared_memory
from netstorm.pslite.host_addresses import is_own_address
from netstorm.pslite.shared_memory import SharedPayloads
owner = SharedPayloads(Counters(), most_bytes=2**26)
print(msgspec.json.encode(owner.lend(1)).decode(), flush=True)
sys.stdin.readline()
owner.share(1)
print(owner.reference(1, np.full(2**20, 9, np.uint8)).hex(), flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        reader = SharedPayloads(Counters(), most_bytes=MOST)
        assert reader.borrow(HERE, msgspec.json.decode(owner.stdout.readline().encode(), type=SharedMemory))
        owner.stdin.write("\n")
        owner.stdin.flush()
        payload = bytes_of(reader.payload(HERE, bytes.fromhex(owner.stdout.readline().strip())))
        mapped = Path(f"/proc/{owner.pid}/maps").read_text()
        owner.kill()
    reader.closed(HERE)
    assert (payload == 9).all()
    payload[:] = 5
    assert (payload == 5).all()
    assert "/memfd:netstorm" in mapped
    assert "/dev/shm" not in mapped, "a name there would stay; what others have there may come and go"


def test_a_forked_child_gives_back_nothing_of_its_parents(pair):
    payload = pair.give(values_of(3))
    child = os.fork()
    if child == 0:
        del payload
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    following = pair.give(values_of(4))
    assert (payload == 3).all()
    assert (following == 4).all()


def test_descriptors_and_mappings_end_with_the_connection_and_the_last_payload(pair):
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    begun = count()
    payloads = []
    for number in range(10, 20):
        pair.connect(Connection(number), Connection(-number))
        payloads.append(pair.give(values_of(number), Connection(number), Connection(-number)))
        pair.owner.closed(Connection(number))
        pair.reader.closed(Connection(-number))
    assert count() > begun
    assert [int(payload[5]) for payload in payloads] == list(range(10, 20))
    payloads.clear()
    assert count() == begun


def test_addresses_of_this_machine_are_recognised_and_names_are_not_looked_up():
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if is_address(entry.address)
    ]
    own = [address for address in found if "%" not in address]
    assert own
    assert all(map(is_own_address, own))
    assert not any(map(is_own_address, ["198.51.100.7", "2001:db8::7", "host.example", ""]))


def test_a_van_of_another_process_without_the_memory_gets_payloads_over_the_connection():
    sender, receiver = ZmqVan(), ZmqVan()
    port = receiver.bind("127.0.0.1", 0)
    sender.open(A, "127.0.0.1", port)
    assert sender.transmit(A, b"head", values_of(1))
    deadline = time.monotonic() + 10
    while not (events := receiver.poll(0.1)):
        assert time.monotonic() < deadline
    assert isinstance(events[0], Received)
    assert (np.frombuffer(events[0].frames[1], np.uint8) == 1).all()
    sender.shut(0)
    receiver.shut(0)
