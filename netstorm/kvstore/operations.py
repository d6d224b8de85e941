"""An all-reduce, as the user submits it. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import ClassVar, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from netstorm.compression.sparse import Numbers
from netstorm.kvstore.forms import Array, Form, Key, Values
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER
from netstorm.protocol.messages import LossTerms
from netstorm.pslite.machine import Call, ForwardedBytes, Instruction, Send

__all__ = [
    "ANY_PEER",
    "UNBOUNDED",
    "AsyncOperation",
    "Bytes",
    "CollectiveCall",
    "Done",
    "Operation",
    "OperationQueue",
    "Outbox",
    "PointToPointOperation",
    "PullOperation",
    "PushOperation",
    "Pushes",
    "ReceiveOperation",
    "RoundTimes",
    "SendOperation",
    "StatesOperation",
]


Done = Callable[[Exception | None], None]
"""Called once, from the I/O thread: None, or why the operation failed. It must not block."""


class CollectiveCall(NamedTuple):
    """The collective call that an operation carries out."""

    group: str
    number: int
    """Counts the calls of the group, from 0, in the order of the program."""
    text: str
    """What was called, with which types and shapes: the same at every member."""
    members: tuple[int, ...] = ()
    """The ranks of the group in the job."""
    timeout_s: float = math.inf
    """The longest wait for its end; reaching it ends the job."""

    def __str__(self) -> str:
        """Return the call as error messages name it."""
        return f"call {self.number} of group {self.group!r}, {self.text}"


class Operation:
    """Sum `source` over all ranks into `destination`, for one round of one key.

    `source` and `destination` are of the types that the operation's form takes: for dense values, flat arrays
    of the key's type, which may be the same memory. `source` None contributes zeros; `destination` None drops
    the result. Both must stay valid until `done` is called, and only the node may change them.
    """

    __slots__ = (
        "begun_at",
        "call",
        "contributors",
        "destination",
        "digest",
        "done",
        "for_others",
        "form",
        "from_lowest",
        "key",
        "lent",
        "loss",
        "priority",
        "receivers",
        "round",
        "rule",
        "source",
    )

    def __init__(
        self,
        *,
        key: Key,
        round: int,
        source: Values | None,
        destination: Values | None,
        done: Done,
        priority: int = 0,
        rule: str = "",
        form: Form | None = None,
        for_others: bool = False,
        receivers: tuple[int, ...] = (),
        call: CollectiveCall | None = None,
        from_lowest: bool = False,
        loss: LossTerms | None = None,
    ) -> None:
        self.key = key
        self.round = round
        self.source = source
        self.destination = destination
        self.done = done
        self.priority = priority
        self.rule = rule if call is None else str(call)
        """Fingerprint of what this rank does with the sum, or of the call; ranks must agree."""
        self.form: Final[Form] = form or key.form
        """How the values travel; ranks must agree, round by round."""
        self.for_others = for_others
        """No program waits for it here: this rank's program has ended, and contributes to the others' rounds.
        """
        self.receivers: Final = receivers
        """For each segment of a collective round: bit set of the ranks that want its result. Others get
        headers alone. Empty: all ranks want everything."""
        self.call: Final = call
        self.digest: Final = 0 if call is None else crc32(self.rule.encode())
        """Of the call: travels with every part, so that ranks whose calls differ never mix their values."""
        self.from_lowest: Final = from_lowest
        """Only the lowest rank of the job contributes its source, as to an initial value."""
        self.contributors: Final[dict[int, int]] = {}
        """By bit set of ranks: bit set of the chunks whose results are the sum of just their contributions.
        There are several only if a rank left or joined the job meanwhile, or with `loss`."""
        self.loss: Final = loss
        """The round may end without some contributions; None: it waits for all. Ranks must agree. The source
        is dense, no memory of the destination, and changes: what was counted becomes zero. So what is left in
        it has not been counted, and belongs to this rank's next contribution."""
        self.begun_at = 0.0
        self.lent = 0
        """How many chunks of its source results under way refer to; see `Loans`."""

    def record_result(self, chunk: int, contributors: int) -> None:
        """Record who is in the result of a chunk."""
        self.contributors[contributors] = self.contributors.get(contributors, 0) | 1 << chunk

    def record_counted(self, start: int, end: int) -> None:
        """Record that a result contains this rank's values of a chunk, from element `start` to `end`."""
        counted = None if self.source is None else self.form.own(self.source, start, end)
        if counted is not None:
            counted[:] = 0

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        if self.call is not None:
            return str(self.call)
        return f"round {self.round} of key {self.key.name!r}"


# What a user submits to an asynchronous store: a push, a pull, or a pull of update states.

UNBOUNDED: Final = -1
"""As a staleness: ranks may be ahead by any number of clocks."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Operation:
    """What all operations on owners have."""

    kind: ClassVar[str]

    key: Key
    number: int
    """Counts the operations of this kind on this key, from 0, in the order of the user's calls."""
    done: Done
    whole: bool = False
    """The update rule needs whole tensors."""
    priority: int = 0
    begun_at: float = 0.0

    @property
    def round(self) -> int:
        """Its number, which the trace shows."""
        return self.number

    def __str__(self) -> str:
        """Return the operation as error messages name it."""
        return f"{self.kind.format(self.number)} of key {self.key.name!r}"


@dataclass(slots=True, kw_only=True, eq=False)
class PushOperation(_Operation):
    """Have the owners of a key update it with `source`.

    `source` is what the form of `codec` takes (a flat array of the key's type, `Signs` or `Rows`). It must
    stay valid and unchanged until `done` is called: then every owner has applied its part.
    """

    kind = "push {}"

    source: Values
    rule: str
    """Fingerprint of the update rule."""
    live: tuple[float, ...] = ()
    """The hyper-parameters that scripts change between pushes."""
    clock: int = 0
    """Taken when the user calls."""
    codec: int = 0
    """The form in which the values travel."""
    threshold: float = 0.0
    """The value of a quantised 1."""


@dataclass(slots=True, kw_only=True, eq=False)
class PullOperation(_Operation):
    """Write the newest values of a key, or of some of its rows, into `destination`: flat, of its type."""

    kind = "pull {}"

    pushed: int
    """How many of this rank's pushes must be in the values: those that the user made before."""
    destination: Array
    least: int | None = None
    """How many clocks of every other rank must be in them, from where this rank began; None: any number."""
    counted: bool = False
    """Whether clocks are those that the script counts; otherwise each push of the key is one."""
    of_all: bool = False
    """Ask all owners, since this rank does not know yet which one has which block."""
    rows: Numbers | None = None
    """Numbers of the rows to pull, rising; None: all. Only of a key whose chunks are whole rows."""


@dataclass(slots=True, kw_only=True, eq=False)
class StatesOperation(_Operation):
    """Collect the states that the owners' update rules keep of a key: bytes for each block.

    It counts as a pull of the key.
    """

    kind = "pull {} (of states)"

    pushed: int
    """How many of this rank's pushes must be in the states."""
    destination: dict[int, bytes]
    with_values: bool = False
    """Whether a block's bytes begin with its values, to which no push is applied before the state is read."""


AsyncOperation: TypeAlias = PushOperation | PullOperation | StatesOperation


class Pushes:
    """What one rank has pushed and pulled of one key, counted where numbers are taken."""

    __slots__ = ("in_clock", "pulls", "total")

    def __init__(self) -> None:
        self.total = 0
        self.in_clock = 0
        """Since the last `clock()`."""
        self.pulls = 0

    def take_push(self) -> int:
        """Return the number of this rank's next push. The push must follow, and pushes in their order."""
        self.total += 1
        self.in_clock += 1
        return self.total - 1

    def take_pull(self) -> int:
        """Return the number of this rank's next pull; likewise."""
        self.pulls += 1
        return self.pulls - 1


# A message from one rank's program to another's: the send and the receive.

ANY_PEER: Final = -1
"""As the peer of a receive: whichever rank's message comes first."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(slots=True, kw_only=True, eq=False)
class SendOperation:
    """Send `source` to rank `peer`.

    The messages of one sender with one channel and tag match receives in the order in which both were
    submitted. `source` is flat and contiguous. It must stay valid and unchanged until `done` is called. For a
    small message (256 KiB) that is at once: it is copied. For a large one, the receiver has it then.
    """

    peer: int
    """Rank in the job."""
    channel: str
    """Name of the process group."""
    tag: int
    source: Bytes
    what: str
    """Describes the values, for error messages: type and shape."""
    done: Done
    refused: Done | None = None
    """Called, after `done`, with the error if the receiver turns out to expect another size, or to have
    finished. Only for small messages: a large one's `done` says so. None: the error is logged.
    """
    begun_at: float = 0.0

    @property
    def name(self) -> str:
        """What the trace shows."""
        return f"send to rank {self.peer}"

    @property
    def round(self) -> int:
        """Its tag, which the trace shows."""
        return self.tag

    def __str__(self) -> str:
        """Return what it waits for, as error messages say it."""
        return f"rank {self.peer} to receive a message (tag {self.tag}, {self.what})"


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiveOperation:
    """Receive a message of exactly the size of `destination`, flat and contiguous, from rank `peer`.

    Only the node may use `destination` until `done` is called.
    """

    peer: int
    """Rank in the job, or `ANY_PEER`."""
    channel: str
    tag: int
    destination: Bytes
    what: str
    done: Done
    peers: tuple[int, ...] = ()
    """For `ANY_PEER`: the ranks whose messages it takes; empty: all."""
    source: int = -1
    """The rank that the message came from, once it has come."""
    begun_at: float = 0.0

    def takes(self, rank: int) -> bool:
        """Return whether it takes messages of a rank."""
        return rank == self.peer or (self.peer == ANY_PEER and (not self.peers or rank in self.peers))

    @property
    def name(self) -> str:
        """What the trace shows."""
        return f"receive from {self._origin}"

    @property
    def round(self) -> int:
        """Its tag, which the trace shows."""
        return self.tag

    def __str__(self) -> str:
        """Return what it waits for, as error messages say it."""
        return f"a message from {self._origin} (tag {self.tag}, {self.what})"

    @property
    def _origin(self) -> str:
        if self.peer != ANY_PEER:
            return f"rank {self.peer}"
        return f"any of ranks {list(self.peers)}" if self.peers else "any rank"


PointToPointOperation: TypeAlias = SendOperation | ReceiveOperation


# Operations whose round may not begin yet, of all keys on one node.


class OperationQueue:
    """Operations that wait for a policy or for earlier rounds.

    They come in any order, since the caller's engine starts them when their data is there.

    Attributes:
        by_key: those of each key, the lowest round first. The caller removes those that begin.
    """

    def __init__(self) -> None:
        self.by_key: Final[dict[int, list[Operation]]] = {}

    def add(self, operation: Operation) -> None:
        """Queue an operation, before those of its key with later rounds."""
        waiting = self.by_key.setdefault(operation.key.identity, [])
        bisect.insort(waiting, operation, key=attrgetter("round"))

    def __iter__(self) -> Iterator[Operation]:
        for waiting in self.by_key.values():
            yield from waiting

    def clear(self) -> None:
        """Drop all operations."""
        self.by_key.clear()


# The instructions of a node, in order, until its driver takes them.


class Outbox:
    """The instructions of one node.

    Attributes:
        instructions: those that nobody has taken yet.
        forwarded: what this node keeps to forward it.
    """

    def __init__(self, most_forwarded: int = 0) -> None:
        """`most_forwarded`: see `ForwardedBytes`."""
        self.instructions: list[Instruction] = []
        self.forwarded: Final = ForwardedBytes(most_forwarded)

    def add(self, *instructions: Instruction) -> None:
        """Queue instructions."""
        self.instructions += instructions

    def add_all(self, instructions: Iterable[Instruction]) -> None:
        """Queue instructions."""
        self.instructions += instructions

    def send_to_scheduler(self, message: m.Message) -> None:
        """Send a message to the scheduler."""
        self.instructions.append(Send(peer=SCHEDULER, message=message))

    def complete(self, done: Done, error: Exception | None) -> None:
        """Have `done` called, with the error if there is one."""
        self.instructions.append(Call(function=partial(done, error)))

    def complete_all(self, waiting: list[Done], error: Exception | None) -> None:
        """Have each of `waiting` called, and clear the list."""
        for done in waiting:
            self.complete(done, error)
        waiting.clear()

    def take(self) -> list[Instruction]:
        """Return all instructions, and begin with an empty list."""
        taken, self.instructions = self.instructions, []
        return taken


# What a node measures of its rounds of local steps, each ended by an exchange.

_SHORTEST_S: Final = 1e-6
"""Of a step: clocks have a resolution, and the state server divides by this."""


class RoundTimes:
    """The times of one training at one node: steps, an exchange, steps, an exchange."""

    def __init__(self, now: float) -> None:
        """Begin with the first step at `now`."""
        self._steps_began = now
        self._exchange_began = now
        self._exchange_s = 0.0

    def exchange_begins(self, steps: int, now: float) -> tuple[float, float]:
        """Record that the round's steps are done. Return the mean time of one, and how long the exchange
        before them took (0: there was none).
        """
        step_s = max(_SHORTEST_S, (now - self._steps_began) / steps)
        self._exchange_began = now
        return step_s, self._exchange_s

    def exchange_ends(self, now: float) -> None:
        """Record that the exchange, or one more part of it, is done, and the next steps begin."""
        self._exchange_s = max(0.0, now - self._exchange_began)
        self._steps_began = now
