"""Groups whose members change by PyTorch's contract: `init_process_group(..., enable_reconfigure=True)`.

    handle = dist._get_reconfigure_handle()
    ...                                        # members tell each other theirs: by a store, a controller
    dist._reconfigure(uuid, handles).wait()    # at each of them, with the same number and handles

Every reconfiguration makes a *view*: a job of its own, whose ranks are the places of the handles. Its
scheduler is a thread of the process whose handle comes first; each process has one, and its handle says
where. So the members meet without a store, and without a process that outlives them.

A member that leaves a view goes on forwarding for the others until they have left it, too, unless calls of
its own are under way: those fail, at all members.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import concurrent.futures
import contextlib
import hashlib
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec

from netstorm.addresses import host_port, is_loopback
from netstorm.errors import NetStormError, Unreachable, UsageError, WaitTimeout
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.internals import ErrorType, Store, set_members_of_world
from netstorm.frontends.torch.member import CallWork, ProcessGroupMember
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.frontends.torch.store import address_of, sealed, unsealed
from netstorm.kvstore.calls import CallPositions
from netstorm.kvstore.process.runtime import CompletionThread, Runtime
from netstorm.pslite.admission import job_key_of, serves_others
from netstorm.pslite.host_addresses import (
    given_host,
    loopback_host,
    machine_number,
    own_addresses,
    resolve,
    source_towards,
)
from netstorm.pslite.io_thread import VanAhead
from netstorm.pslite.keys import JobKey
from netstorm.scheduler.members import REMIND_EVERY_S
from netstorm.scheduler.process.scheduler_thread import SchedulerThread
from netstorm.settings import Settings

__all__ = ["Handle", "ReconfigurableGroup", "View", "encode_handle", "view_of"]

# Handles, and the views that they make. Pure.

_MARK: Final = ":"
_PREFIX: Final = f"netstorm{_MARK}"

_NAME: Final = "reconfigure handle"
"""What the code under the job's key is bound to."""


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What others must know of one process's group to make a view with it."""

    identity: str
    """Of the group in this process: another one after a restart."""
    machine: int
    """Processes of one machine have the same number, and reach each other over loopback."""
    host: str
    """Name of the machine, for messages."""
    pid: int
    address: str
    """At which others reach the process's scheduler."""
    port: int

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host}, at {host_port(self.address, self.port)}"


def encode_handle(handle: Handle, key: JobKey | None) -> str:
    """Return a handle as text; with a key it has a code that only who has the key can make."""
    text = base64.urlsafe_b64encode(msgspec.msgpack.encode(handle)).decode()
    return sealed(f"{_PREFIX}{text}", _NAME, key)


def _decoded(text: str, key: JobKey | None) -> Handle:
    prefix, mark, content = unsealed(text, _NAME, key).partition(_MARK)
    try:
        packed = base64.b64decode(content if prefix + mark == _PREFIX else "?", altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(packed, type=Handle)
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise UsageError(
            f"reconfigure handle {text[:80]!r}: expected what torch.distributed._get_reconfigure_handle() "
            f"returns at a member with the backend netstorm, of the same release ({error})"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The members that a reconfiguration asks for."""

    uuid: int
    members: tuple[Handle, ...]
    """By rank."""
    rank: int
    """This process's."""
    job: str
    """Name of the view's job: that of no view with other members."""

    def __str__(self) -> str:
        named = "; ".join(f"rank {rank}: {member}" for rank, member in enumerate(self.members[:_MOST_NAMED]))
        more = len(self.members) - _MOST_NAMED
        return f"view {self.uuid} ({named}{f'; and {more} more' if more > 0 else ''})"


_MOST_NAMED: Final = 16


def view_of(uuid: int, handles: Iterable[str], own: str, key: JobKey | None) -> View:
    """Return the view that these handles make. Ranks are their places; a set's handles are sorted.

    Args:
        uuid: of the view.
        handles: of all members.
        own: this process's.
        key: the job's.

    Raises:
        UsageError: a handle is wrong or there twice, there are none, or this process's is not among them.
        NotAuthorised, SettingsError: a handle was not made under the same key.
    """
    texts = sorted(handles) if isinstance(handles, set | frozenset) else list(handles)
    if not texts:
        raise UsageError("reconfigure() with no handles: expected one of each member")
    members = tuple(_decoded(text, key) for text in texts)
    identities = [member.identity for member in members]
    twice = [member for member in members if identities.count(member.identity) > 1]
    if twice:
        raise UsageError(f"reconfigure() has the handle of {twice[0]} twice: expected one of each member")
    if own not in texts:
        raise UsageError(
            f"reconfigure() has handles of {len(texts)} members, and this process's is not among them: a "
            "process that is to leave makes no call, or reconfigures with others"
        )
    rank = texts.index(own)
    first = members[0]
    far = next((member for member in members if member.machine != first.machine), None)
    if far is not None and is_loopback(first.address):
        raise Unreachable(
            f"{first}, whose handle comes first, can be reached on its own machine alone, and {far} is on "
            "another one: set NETSTORM_KEY_FILE to the same job key at all ranks (`netstorm keys new` makes "
            "one), and DMLC_NODE_HOST where a host has several addresses"
        )
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
    return View(uuid=uuid, members=members, rank=rank, job=f"view-{uuid}-{digest}")


# The group: leaves one view and enters the next.

_LEAVE_S: Final = 10.0
"""How long a member that has left a view forwards for others, and how long its process waits for them at its
end. Those that need longer than that have not noticed that the view is over."""

_NAMING_S: Final = REMIND_EVERY_S + 0.5
"""By how much others wait longer than the process with the scheduler, which says who is missing."""

_OF_VIEW: Final = ("_member", "_exchanges", "_sparse", "_monitored_barriers")


class ReconfigurableGroup(NetStormProcessGroup):
    """A group whose members change. Before the first `reconfigure`, and after one that failed, it is in no
    view, and calls are errors.
    """

    supports_reconfigure = True

    def __init__(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> None:
        """Listen for members of views whose scheduler this process will have.

        Args:
            store: PyTorch's, of this group.
            rank, size: as the program says; what PyTorch returns before the first reconfiguration.
            name: of the group.
            timeout: of calls and reconfigurations that bring none.

        Raises:
            UsageError: settings that such a group cannot have.
        """
        self._begin(rank, size, name, store)
        self._closed = self._close
        self._place = rank, size
        self._limit = timeout
        self._settings: Final = _settings(timeout)
        self._key: Final = job_key_of(self._settings)
        address = _address(self._settings, store)
        self._scheduler: Final = SchedulerThread(self._settings, address)
        self._handle: Final = encode_handle(
            Handle(
                identity=secrets.token_hex(8),
                machine=machine_number(),
                host=socket.gethostname(),
                pid=os.getpid(),
                address=address,
                port=self._scheduler.port,
            ),
            self._key,
        )
        self._why_none = "it has not been reconfigured yet"
        self._used: Final[set[int]] = set()
        self._changing: Final = threading.Lock()
        self._thread: Final = CompletionThread("netstorm-completion")
        self._retiring: list[threading.Thread] = []
        self._next: _NextNode | None = None
        self._namespace = 0
        self._within: Final[list[NetStormProcessGroup]] = []
        """Groups of members of the view."""
        self._at_exit: Final = _shuts_down(weakref.ref(self))
        atexit.register(self._at_exit)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_VIEW:
            raise UsageError(
                f"process group {self._name!r} is in no view: {self._why_none}; call "
                "torch.distributed._reconfigure() with a new uuid and the handles of all members"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ------------------------------------------------------------------------------------- what PyTorch asks

    def rank(self) -> int:
        """Return this process's rank in the view; before the first one, that of `init_process_group`."""
        return self._place[0]

    def size(self) -> int:
        """Return how many members the view has; before the first one, as `init_process_group` was told."""
        return self._place[1]

    getRank, getSize = rank, size  # noqa: N815 -- PyTorch's names

    @property
    def failure(self) -> NetStormError | None:
        """Why calls in this view fail; None while they do not, or if the group is in no view."""
        return self._member.runtime.failure if "_member" in vars(self) else None

    def get_error(self) -> ErrorType:
        """Return what has made the view useless, in PyTorch's words."""
        failure = self.failure
        if failure is None:
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if isinstance(failure, WaitTimeout) else ErrorType.COMM_ERROR

    @property
    def _timeout(self) -> timedelta:
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later calls and reconfigurations."""
        self._limit = timeout
        if "_member" in vars(self):
            self._member.timeout = timeout

    def get_reconfigure_handle(self) -> str:
        """Return what the others need to make a view with this process; the same as long as it runs."""
        return self._handle

    def reconfigure(self, options: Any) -> CallWork:
        """Enter another view, as PyTorch's `ReconfigureOptions` say; hints are not used. See `enter`.

        Returns:
            The work, which has ended.
        """
        limit = options.timeout or self._limit
        self.enter(int(options.uuid), options.handles, limit)
        work = self._member.work(f"reconfigure({options.uuid})", [], limit)
        work.finish(None)
        return work

    @raises_torch_errors
    def enter(self, uuid: int, handles: Iterable[str], timeout: timedelta) -> None:
        """Leave the view, and enter another one, once all its members have come.

        Args:
            uuid: of the view; a new one each time.
            handles: of all members. Their order is that of the ranks; handles in a set are sorted.
            timeout: longest wait for the others.

        Raises:
            UsageError: the number was used before, or handles are wrong. The group stays in its view.
            NetStormError: not every member has come; names them. The group is in no view.
        """
        self._check_open()
        with self._changing:
            if uuid in self._used:
                raise UsageError(
                    f"reconfigure(): uuid {uuid} was already used by this group: expected a new one each time"
                )
            view = view_of(uuid, handles, self._handle, self._key)
            self._used.add(uuid)
            self._leave(f"the group was reconfigured, to view {uuid}")
            try:
                self._join(view, timeout.total_seconds())
                self._next = _NextNode.of_members(view, self._settings)
            except NetStormError as error:
                self._why_none = f"its last reconfiguration has failed ({error})"
                raise type(error)(f"{error}. Members of {view}; rank 0's process has the scheduler") from None

    def within(self, options: Any) -> NetStormProcessGroup:
        """Create a group of members of the view, as `new_group` asks for. It ends with the view.

        Args:
            options: PyTorch's `_DistributedBackendOptions`.

        Raises:
            UsageError: the group is in no view.
        """
        view = self._member
        ranks = tuple(options.global_ranks_in_group) or tuple(range(view.size))
        # PyTorch's names count the groups of a process: another number where others have been in more views.
        number = sum(group.member.ranks == ranks for group in self._within)
        member = ProcessGroupMember(
            f"{view.name}/{','.join(map(str, ranks))}/{number}",
            ranks,
            runtime=view.runtime,
            namespace=self._namespace,
            thread=self._thread,
            timeout=options.timeout,
            positions=view.positions,
        )
        group = NetStormProcessGroup(member, lambda: None, options.store)
        self._within.append(group)
        return group

    def abort(self) -> None:
        """Leave the view at once; calls under way fail, at all members. The group can be reconfigured."""
        with self._changing:
            if "_member" in vars(self):
                self._member.runtime.fail(f"process group {self._name!r} was aborted")
            self._leave(f"process group {self._name!r} was aborted")

    def shutdown(self) -> None:
        """Destroy the group. Waits until the others have left the view, or a moment. Twice does no harm."""
        if not self._is_closed:
            self._is_closed = True
            self._closed()

    # -------------------------------------------------------------------------------------- entering, leaving

    def _join(self, view: View, limit_s: float) -> None:
        first, has_scheduler = view.members[0], view.rank == 0
        settings = self._settings.changed(
            job=view.job,
            rank=view.rank,
            num_workers=len(view.members),
            scheduler_host=first.address,
            scheduler_port=first.port,
            join_timeout_s=limit_s + _NAMING_S,
        )
        late = threading.Timer(limit_s, self._scheduler.give_up, (view.job, limit_s))
        late.daemon = True
        if has_scheduler:
            late.start()
        ahead = None if self._next is None else self._next.take()
        self._next = None
        try:
            runtime = Runtime(settings, framework="PyTorch", ahead=ahead)
        except BaseException:
            if ahead is not None:
                ahead.close()
            raise
        finally:
            late.cancel()
        self._namespace = runtime.open_namespace()
        self._enter(
            ProcessGroupMember(
                f"{self._name}/{view.uuid}",
                range(len(view.members)),
                runtime=runtime,
                namespace=self._namespace,
                thread=self._thread,
                timeout=self._limit,
                positions=CallPositions(later=False),
            )
        )
        self._place = view.rank, len(view.members)
        set_members_of_world(self, len(view.members))

    def _leave(self, why: str) -> None:
        """Leave the view, if the group is in one."""
        self._why_none = why
        if "_member" not in vars(self):
            return
        runtime = self._member.runtime
        self._sparse.close()
        for group in self._within:
            group.end(
                f"was made in a view of the default group that is over ({why}): make it again, by "
                "new_group() in the next view, and what uses it, such as a DeviceMesh"
            )
        self._within.clear()
        for name in _OF_VIEW:
            delattr(self, name)
        thread = runtime.retire(why, _LEAVE_S)
        self._retiring = [each for each in (*self._retiring, thread) if each.is_alive()]
        if self._settings.port:  # the next view's node listens there
            thread.join()

    def _close(self) -> None:
        with self._changing:
            atexit.unregister(self._at_exit)
            self._leave("it has been destroyed")
            for thread in self._retiring:
                thread.join()
            if self._next is not None:
                self._next.close()
            self._scheduler.close()
            self._thread.close()


# What the next view needs, made while the program is in this one.

_MOST_AHEAD: Final = 64
"""Members to which a process connects ahead: each takes a few descriptors, and 20 kB here and there."""

_TAKE_S: Final = 0.2
"""How long a reconfiguration waits for connections that are about to be begun: names are looked up."""


class _NextNode:
    """The van of the node of the next view. The scheduler of that is at one of the members of this view, most
    likely: a process is connected to all of them by then.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], settings: Settings) -> None:
        self._addresses: Final = addresses
        self._settings: Final = settings
        self._made: Final[Future[VanAhead]] = Future()
        self._thread: Final = threading.Thread(target=self._make, name="netstorm-next-view", daemon=True)
        self._thread.start()

    @classmethod
    def of_members(cls, view: View, settings: Settings) -> _NextNode | None:
        """Return what connects to a view's members; None: all are on this machine, and near enough."""
        own = view.members[view.rank].machine
        far = [(member.address, member.port) for member in view.members if member.machine != own]
        return cls(far[:_MOST_AHEAD], settings) if far else None

    def take(self) -> VanAhead | None:
        """Return the van, once; None: there is none yet."""
        concurrent.futures.wait([self._made], _TAKE_S)
        if self._made.done() and self._made.exception() is None:
            return self._made.result()
        self._made.add_done_callback(_close_made)
        return None

    def close(self) -> None:
        """Close the van instead."""
        self._made.add_done_callback(_close_made)
        self._thread.join(_LEAVE_S)

    def _make(self) -> None:
        try:
            ahead = VanAhead(self._settings)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the next view's node says so, if it lasts
            self._made.set_exception(error)
            return
        for host, port in self._addresses:
            with contextlib.suppress(NetStormError):  # a name that has no address now
                ahead.connect(resolve(host, "DMLC_NODE_HOST", for_others=True), port)
        self._made.set_result(ahead)


def _close_made(made: Future[VanAhead]) -> None:
    if made.exception() is None:
        made.result().close()


def _settings(timeout: timedelta) -> Settings:
    """Return this process's settings as those of a member of any view.

    Raises:
        UsageError: NETSTORM_ELASTIC, which is another way to let members come and go.
    """
    settings = Settings.from_environment()
    if settings.elastic_range is not None:
        raise UsageError(
            f"NETSTORM_ELASTIC={settings.elastic} with enable_reconfigure=True: expected one of them; in "
            "an elastic job NetStorm itself decides who is in"
        )
    if settings.source("wait_timeout_s") == "default":
        settings = settings.changed(wait_timeout_s=timeout.total_seconds())
    return settings


def _address(settings: Settings, store: Store) -> str:
    """Return the address at which others reach this process: the one that it was given, or from which it
    reaches the others' store; loopback, if it may not be reached from elsewhere.
    """
    given = given_host(
        node_host=settings.node_host, interface=settings.interface, bind_host=settings.bind_host
    )
    if given is not None:
        return given[0]
    if not serves_others(settings):
        return loopback_host()
    towards = [source for address in address_of(store) if (source := source_towards(address)) is not None]
    likely = [address for address in (*towards, *own_addresses()) if not is_loopback(address)]
    return likely[0] if likely else loopback_host()


def _shuts_down(group: weakref.ref[ReconfigurableGroup]) -> Callable[[], None]:
    """Return what ends a group at the end of the process, if the program has not."""

    def shut_down() -> None:
        alive = group()
        if alive is not None:
            alive.shutdown()

    return shut_down
