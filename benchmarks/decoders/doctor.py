"""What the doctor reads: messages of doctors on other hosts, and logs that anybody may have written."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any, Final

import msgspec

from decoders.wire import PACK_ERRORS
from netstorm.cli.doctor.logs import Log, explain
from netstorm.cli.doctor.machine import judge_machine
from netstorm.cli.doctor.pairs import ExaminedHost, judge_hosts, network_of
from netstorm.cli.doctor.wire import DoctorMessage, Done, Results, decode
from netstorm.errors import PeerError, UsageError
from netstorm.lab.testing.decoders import FuzzTarget, example, mutate_bytes, mutate_value, of_words

__all__ = ["TARGETS"]


def _judge(data: bytes) -> Hashable:
    """Do with a message what a doctor does that has asked for it."""
    message = decode(data)
    if isinstance(message, Done):
        judge_machine(message.facts, alone=False)
        judge_hosts(
            [ExaminedHost(name="a", facts=message.facts), ExaminedHost(name="b", facts=message.facts)]
        )
    if isinstance(message, Results):
        place = "10.0.0.1:9100"  # others are dropped: nobody has asked for them
        results = [msgspec.structs.replace(one, rank=1, place=place) for one in message.results]
        hosts = [ExaminedHost(name="a", results=results), ExaminedHost(name="b", given=("b", 1))]
        judge_hosts(hosts)
        network_of(hosts)
    return type(message).__name__


def _messages() -> list[bytes]:
    return [
        msgspec.msgpack.encode({"is": kind.__struct_config__.tag, **example(kind, variant)})
        for kind in DoctorMessage.__subclasses__()
        for variant in (0, 1)
    ]


def _mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
    if chance.random() < 0.2:
        return mutate_bytes(chance, data, other)
    try:
        value: Any = mutate_value(chance, msgspec.msgpack.decode(data), msgspec.msgpack.decode(other))
        return msgspec.msgpack.encode(value)
    except PACK_ERRORS:
        return mutate_bytes(chance, data, other)


def _explain(data: bytes) -> Hashable:
    lines = data.decode("utf-8", errors="replace").splitlines()
    return len(explain([Log(name="rank-1.log", lines=tuple(lines))]))


_LOG: Final = (
    b"16:47:38 netstorm ERROR the job ends: rank 1 (10.0.0.2:39367) is lost: killed by SIGKILL\n"
    b"[launch] rank 2 on tokyo was killed by SIGKILL: step 9; ranks 0-1 have 20 s to end by themselves\n"
    b'[rank1]:   File "/home/me/train.py", line 8, in <module>\n'
    b"[rank1]: ValueError: bad sample 17\n"
)

TARGETS: Final = (
    FuzzTarget(
        name="doctors", decode=_judge, allowed=(PeerError, UsageError), seeds=_messages, mutate=_mutate
    ),
    FuzzTarget(
        name="failed-logs",
        decode=_explain,
        allowed=(),
        seeds=lambda: [_LOG],
        mutate=of_words(
            (b"the job ends: ", b"rank 1 ", b" on ", b"was killed by ", b"[rank1]: ", b"; ", b'  File "')
        ),
    ),
)
