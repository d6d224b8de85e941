"""States that programs go on with: logs of schedulers, states in files of safetensors, requests."""

from __future__ import annotations

import random
from base64 import b64decode
from collections.abc import Hashable
from typing import Any, Final

import msgspec
import numpy as np

from decoders.files import logs, mutate_log
from decoders.wire import PACK_ERRORS
from netstorm.checkpoint.format import NumpyTensors
from netstorm.checkpoint.format import pack as pack_state
from netstorm.checkpoint.format import unpack as unpack_state
from netstorm.errors import CheckpointError, PeerError, UsageError
from netstorm.lab.emulation.messages import parse_request
from netstorm.lab.testing.decoders import FuzzTarget, mutate_bytes, mutate_value, of_words
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER
from netstorm.pslite.machine import Admit
from netstorm.scheduler import replay_log as r
from netstorm.scheduler.launched_ranks import RankEnded, read_rank_ended
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log import ReplayedJob

__all__ = ["TARGETS"]

_TENSORS: Final = NumpyTensors()
_STATE: Final = {
    "step": 3,
    "rate": 0.5,
    "names": ["a", "b"],
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
    "more": (True, None, b"x", np.ones(3, np.int64)),
}

# ------------------------------------------------------------------------------------------------- schedulers


def _resume(data: bytes) -> Hashable:
    """Go on with the job of a log, as a scheduler does that was started again; its nodes come back."""
    found, _ = r.read(data, "the log")
    replayed = ReplayedJob.replay(found, "the log")
    if replayed is None:
        return None
    options = SchedulerOptions(
        num_workers=len(replayed.members), job=replayed.began.job, release=replayed.began.release
    )
    machine = SchedulerMachine(
        options, replayed.policies[replayed.version], now=0.0, write=lambda _: None, replayed=replayed
    )
    refused = 0
    for member in replayed.members[:4]:
        hello = m.Hello(
            job=options.job,
            sender=member.rank,
            incarnation=member.incarnation,
            receiver=SCHEDULER,
            session=1,
            received=0,
        )
        verdict = machine.admit(hello)
        if not isinstance(verdict, Admit):
            continue
        for message in (
            m.Resume(keys=(), begun=(m.RoundBegun(0, 1, "sgd"),), barriers=(0,)),
            m.RegisterKeys(keys=(m.KeySpec(0, "w", (3,), "float32"),)),
            m.Barrier(number=1),
        ):
            try:
                machine.receive(verdict.peer, message, None, None, 1.0)
            except PeerError:
                refused += 1
    machine.tick(2.0)
    machine.snapshots(2.0)
    return machine.phase, refused, min(9, len(machine.take_instructions()))


# ------------------------------------------------------------------------------------------------ checkpoints


def _mutate_state(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly change what says where the tensors are, or what is beside them, and keep its length right."""
    if chance.random() < 0.3:
        return mutate_bytes(chance, data, other)
    size = int.from_bytes(data[:8], "little")
    try:
        header, further = (
            msgspec.json.decode(one[8 : 8 + int.from_bytes(one[:8], "little")]) for one in (data, other)
        )
        if chance.random() < 0.5:
            header = mutate_value(chance, header, further)
        else:
            tree = msgspec.json.decode(header["__metadata__"]["tree"])
            tree["values"] = msgspec.to_builtins(mutate_bytes(chance, b64decode(tree["values"]), other))
            header["__metadata__"]["tree"] = msgspec.json.encode(mutate_value(chance, tree, tree)).decode()
        head = msgspec.json.encode(header)
    except (*PACK_ERRORS, AttributeError, LookupError):  # mutated before
        return mutate_bytes(chance, data, other)
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def _kind(value: object) -> Hashable:
    return type(value).__name__, len(value) if isinstance(value, (dict, list, tuple)) else 0


def _requests() -> list[bytes]:
    found: list[dict[str, Any]] = [
        {"do": "set", "source": 0, "target": 1, "rate": 1e6, "latency": 0.01, "loss": 0.0},
        {"do": "start"},
        {"do": "status"},
        {"do": "down"},
    ]
    return [msgspec.json.encode(one) for one in found]


def _words() -> list[bytes]:
    ended = [
        RankEnded.of(1, 1, "exit code 1", "10.0.0.7", b"ImportError: x", again=False),
        RankEnded.of(0, 137, "killed by SIGKILL", "127.0.0.1", b"", again=True),
    ]
    return [msgspec.json.encode(one) for one in ended]


TARGETS: Final = (
    FuzzTarget(
        name="resumed",
        decode=_resume,
        allowed=(UsageError,),
        seeds=logs,
        mutate=mutate_log,
    ),
    FuzzTarget(
        name="states",
        decode=lambda data: _kind(unpack_state(bytearray(data), _TENSORS)),
        allowed=(CheckpointError,),
        seeds=lambda: [bytes(pack_state(_STATE, _TENSORS)), bytes(pack_state([], _TENSORS))],
        mutate=_mutate_state,
    ),
    FuzzTarget(
        name="wan-requests",
        decode=lambda data: type(parse_request(data)).__name__,
        allowed=(UsageError,),
        seeds=_requests,
        mutate=of_words((b'"do": ', b'"set"', b'"source"', b"1e999", b"null", b"{", b"}", b"[", b",")),
    ),
    FuzzTarget(
        name="launcher-words",
        decode=lambda data: read_rank_ended(data).again,
        allowed=(PeerError,),
        seeds=_words,
        mutate=of_words((b'"rank":', b'"code":', b"1e999", b"null", b"\\u0000", b"{", b"}", b",")),
    ),
)
