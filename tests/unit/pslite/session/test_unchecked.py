"""Payloads have checksums, unless both ends are on one machine and connected by its loopback."""

from __future__ import annotations

import pytest

from netstorm.lab.testing.recorder import part
from netstorm.protocol.frames import Peer, open_frames
from netstorm.pslite.machine import Send
from tests.unit.pslite.world import World

LOOPBACK = "127.0.0.{rank}"


def world_of(*boots, hosts=LOOPBACK):
    world = World(hosts=hosts)
    for process, boot in zip(world.processes, boots, strict=True):
        process.endpoint.process.boot = boot
    return world, *world.pair()


def checksums_of_payloads(world):
    """Return the list to which the checksum of each payload that arrives from now on is written."""
    found = []

    def watch(_source, _target, header, payload):
        if payload is not None:
            found.append(open_frames(header, 2).payload_crc)

    world.network.watch = watch
    return found


def test_payloads_within_one_machine_go_without_checksums_both_ways():
    world, here, there = world_of(7, 7)
    found = checksums_of_payloads(world)
    here.send(there, part(0), b"123456789")
    world.run(1)
    there.machine.instructions.append(Send(peer=Peer(0), message=part(1), payload=b"1", back=True))
    world.run(1)
    assert found == [None, None]
    assert there.machine.payloads() == {0: b"123456789"}
    assert here.machine.payloads() == {1: b"1"}


@pytest.mark.parametrize(
    ("boots", "hosts"),
    [
        ((7, 8), LOOPBACK),  # a tunnel to another machine
        ((7, 7), "10.0.0.{rank}"),  # an emulated network
        ((7, 7), "host{rank}"),
        ((0, 0), LOOPBACK),
        ((0, 7), LOOPBACK),  # one side wants them always
        ((7, 0), LOOPBACK),
    ],
)
def test_all_other_payloads_have_checksums(boots, hosts):
    world, here, there = world_of(*boots, hosts=hosts)
    found = checksums_of_payloads(world)
    here.send(there, part(0), b"123456789")
    world.run(1)
    assert found == [0xE3069283]


def test_a_payload_without_a_checksum_is_asked_for_again_where_it_must_have_one():
    world, here, there = world_of(0, 0)
    transmit = here.van.transmit
    forged: list[bytes] = []

    def without_checksum(connection, header, payload):
        if payload is not None and not forged:  # the flags are covered by no checksum
            forged.append(header)
            header = header[:3] + bytes([header[3] | 8]) + header[4:]
        return transmit(connection, header, payload)

    here.van.transmit = without_checksum
    here.send(there, part(0), b"123456789")
    world.run(1)
    assert there.machine.payloads() == {0: b"123456789"}
    assert there.endpoint.links()[Peer(0), False]["dropped_checksum"] == 1


def test_what_came_without_a_checksum_has_one_on_a_link_that_needs_it():
    world, here, there = world_of(7, 7)
    found = checksums_of_payloads(world)
    third = world.add(2)
    here.connect(third)
    there.connect(third)
    received = []
    there.machine.receive = lambda *arguments: received.append(arguments)
    here.send(there, part(0), b"123456789")
    world.run(1)
    [(_, message, payload, crc, _)] = received
    there.machine.instructions.append(Send(peer=Peer(2), message=message, payload=payload, payload_crc=crc))
    world.run(1)
    assert found == [None, 0xE3069283]
    assert third.machine.payloads() == {0: b"123456789"}
