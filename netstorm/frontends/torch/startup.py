"""Joins the job when a program creates its first NetStorm group, and makes the groups of this process.

The members of the first group are the job's nodes, and its ranks the job's. All later groups are made of
them, over the same connections. If no scheduler is named (`DMLC_PS_ROOT_URI` or `DMLC_PS_ROOT_PORT`), rank 0
starts one beside itself, and the others find it in PyTorch's store: that is how jobs of `torchrun` begin.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch

from netstorm import clock
from netstorm.addresses import is_loopback, split_host_port
from netstorm.errors import (
    NetStormError,
    SettingsError,
    Unreachable,
    UsageError,
    WaitTimeout,
)
from netstorm.frontends.torch.errors import let_backward_raise_own_errors, raises_torch_errors
from netstorm.frontends.torch.gradient_codecs import codec_of_settings, let_models_use_it
from netstorm.frontends.torch.internals import Store, default_timeout
from netstorm.frontends.torch.member import ProcessGroupMember
from netstorm.frontends.torch.process_group import NetStormProcessGroup, let_pytorch_call_us
from netstorm.frontends.torch.store import address_of, sealed, unsealed
from netstorm.kvstore.calls import CallPositions
from netstorm.kvstore.process.runtime import (
    CompletionThread,
    Runtime,
    after_close,
    leave_job,
    runtime_of_this_process,
)
from netstorm.pslite.admission import job_key_of, load_credentials
from netstorm.pslite.host_addresses import (
    given_host,
    loopback_host,
    machine_number,
    own_addresses,
    source_towards,
    tcp_listener,
)
from netstorm.pslite.keys import JobKey
from netstorm.scheduler.process.scheduler_child import SchedulerChild, start_scheduler
from netstorm.settings import Settings, foreign_variable

__all__ = [
    "answering",
    "before_leaving",
    "create_process_group",
    "join_before_rendezvous",
    "meet",
    "reachable",
    "refuse",
    "runtime_of_job",
    "untested_version",
]


# The scheduler that rank 0 starts beside itself if none is named, and how the others find it.
#
# The members of a group tell each other through PyTorch's store on which machines they are. On one machine
# the scheduler listens on loopback. Else rank 0 offers all its addresses, each member tries them, and the
# scheduler listens at one that all have reached: neither the name of a host nor the store's address says
# which that is.

_SLICE_S: Final = 0.02
_REMIND_S: Final = 10.0

_TRY_S: Final = 10.0
"""How long all addresses of rank 0 are tried, at once: time for TCP's attempts after 1, 3 and 7 s."""

_LATER_S: Final = 1.5
"""How much longer than the first that answers: the others may be more of use to other members."""

_TOKEN_BYTES: Final = 16

_HINT: Final = (
    "set DMLC_NODE_HOST at rank 0 to its host's address that all others can reach, or start `netstorm "
    "scheduler` on a host that all reach, and set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT at all ranks"
)


class _Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one member writes into the store for the others."""

    machine: int = 0
    """Of the writer: those that have the same reach each other over loopback."""
    name: str = ""
    """Of the writer's host, for messages."""
    addresses: tuple[str, ...] = ()
    """Of rank 0's host; from another rank those of them that it has reached, and when it comes, where its
    store is.
    """
    port: int = 0
    """At which rank 0 answers, or, in its last note, its scheduler."""
    token: bytes = b""
    """What it answers: by it the others know that they have reached it, and no other machine."""
    hidden: str = ""
    """The setting because of which no other machine would reach the writer."""
    error: str = ""
    """Why the job does not come together."""


@dataclass(frozen=True, slots=True)
class _Notes:
    """The notes of one group in PyTorch's store."""

    store: Store
    prefix: str
    """Of their keys: the same at all members, and of this group alone."""
    limit_s: float
    """Longest wait for another member."""
    key: JobKey | None
    """The job's, under which notes carry a code."""

    @classmethod
    def of_group(cls, store: Store, rank: int, limit_s: float, key: JobKey | None) -> _Notes:
        """Return the notes of the group that its members are about to make; `rank` is this one's in it.

        PyTorch gives each group a part of the store, by the group's name. A group of that name may have been
        before, so the store counts for each member how often it came: that is the same for all members,
        whatever other groups each of them was in. torchrun's store outlives its ranks: it counts restarts.
        """
        restart = foreign_variable("TORCHELASTIC_RESTART_COUNT") or 0
        nth = store.add(f"netstorm/{restart}/{rank}", 1)
        return cls(store, f"netstorm/{restart}/{nth}", limit_s, key)

    def write(self, what: str, note: _Note) -> None:
        name = f"{self.prefix}/{what}"
        self.store.set(name, sealed(msgspec.json.encode(note).decode(), name, self.key))

    def refuse(self, rank: int, text: str) -> None:
        """Tell all others, at another rank than 0 by rank 0, why there will be no job."""
        with contextlib.suppress(Exception):  # the store may be why
            for what in ("come", "reached") if rank else ("offer", "scheduler"):
                self.write(f"{what}/{rank}", _Note(error=text))

    def read(self, what: str, ranks: Iterable[int]) -> dict[int, _Note]:
        """Return the notes of these ranks, once they have written them.

        Raises:
            UsageError: one of them says that there will be no job.
            WaitTimeout: names those that have not.
        """
        notes: dict[int, _Note] = {}
        missing = sorted(ranks)
        began = now = clock.monotonic()
        remind_at = began + _REMIND_S
        while True:
            for rank in [rank for rank in missing if self.store.check([self._key(what, rank)])]:
                name = self._key(what, rank)
                notes[rank] = self._open(self.store.get(name), name)
                if notes[rank].error:
                    raise UsageError(f"rank {rank} of this group makes no job: {notes[rank].error}")
                missing.remove(rank)
            if not missing:
                return notes
            late = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:32]))}"
            if now > began + self.limit_s:
                raise WaitTimeout(
                    f"not every rank came within {self.limit_s:g} s (NETSTORM_JOIN_TIMEOUT): nothing in "
                    f"PyTorch's store is from {late} of this group"
                )
            if now > remind_at:
                _log.warning("waiting for %s of this group, by PyTorch's store", late)
                remind_at = now + _REMIND_S
            clock.sleep(max(_SLICE_S, clock.monotonic() - now))  # a store that is far away: less often
            now = clock.monotonic()

    def _key(self, what: str, rank: int) -> str:
        return f"{self.prefix}/{what}/{rank}"

    def _open(self, written: bytes, name: str) -> _Note:
        text = unsealed(written.decode(errors="replace"), name, self.key)
        try:
            return msgspec.json.decode(text, type=_Note)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{name!r} in PyTorch's store is {text[:200]!r}: expected a note of NetStorm's ({error}); "
                "somebody else writes to the store, or another release of NetStorm"
            ) from None


def refuse(store: Store, rank: int, text: str) -> None:
    """Tell the other members of a group why this one makes no job with them, instead of `meet`."""
    _Notes.of_group(store, rank, 0.0, job_key_of(Settings.from_environment())).refuse(rank, text)


def meet(store: Store, rank: int, size: int, settings: Settings) -> tuple[str, int, SchedulerChild | None]:
    """Return host and port of the scheduler of a new job, and the process at rank 0, which has started it.

    Args:
        store: the group's part of PyTorch's.
        rank: this member's in the group.
        size: number of members.
        settings: of this process.

    Raises:
        NetStormError: at all members, for one reason: no address of rank 0's host is reached by all; several
            hosts, and no key; the scheduler does not start; a member does not come.
    """
    notes = _Notes.of_group(store, rank, settings.join_timeout_s, job_key_of(settings))
    try:
        given = given_host(
            node_host=settings.node_host, interface=settings.interface, bind_host=settings.bind_host
        )
        own = _Note(
            machine=machine_number(),
            name=socket.gethostname(),
            addresses=address_of(store),
            hidden=given[1] if given is not None and is_loopback(given[0]) else "",
        )
        notes.write(f"come/{rank}", own)
        if rank:
            return *_find(notes, rank, own), None
        members = notes.read("come", range(size))
        host = _chosen_host(notes, members, settings, given)
        scheduler = start_scheduler(settings, host)
        port = split_host_port(scheduler.address)[1]
    except BaseException as error:
        text = str(error) if isinstance(error, NetStormError) else f"{type(error).__name__}: {error}"
        notes.refuse(rank, text)
        raise
    notes.write("scheduler/0", _Note(addresses=(host,), port=port))
    if settings.bind_host == "*" and host not in own_addresses():  # a NAT's, which may not lead back
        host = loopback_host()
    return host, port, scheduler


def _find(notes: _Notes, rank: int, own: _Note) -> tuple[str, int]:
    """Return the scheduler's host and port, at another rank than 0."""
    offer = notes.read("offer", [0])[0]
    if offer.addresses:
        # Of another host's addresses those that this host has, too, mean this host here: those of bridges to
        # containers are the same everywhere.
        ours = set() if offer.machine == own.machine else set(own_addresses())
        tried = [address for address in offer.addresses if address not in ours]
        reached = reachable(tried, offer.port, offer.token, _TRY_S)
        notes.write(f"reached/{rank}", _Note(name=own.name, addresses=tuple(reached)))
    scheduler = notes.read("scheduler", [0])[0]
    return scheduler.addresses[0], scheduler.port


def _chosen_host(
    notes: _Notes, members: dict[int, _Note], settings: Settings, given: tuple[str, str] | None
) -> str:
    """Return the address for the scheduler, at rank 0, which all members can reach."""
    elsewhere = [rank for rank in members if members[rank].machine != members[0].machine]
    if not elsewhere:
        notes.write("offer/0", _Note())
        return loopback_host() if given is None else given[0]
    first = f"rank {elsewhere[0]} (host {members[elsewhere[0]].name})"
    for rank, note in members.items():
        if note.hidden:
            raise Unreachable(
                f"{note.hidden} at rank {rank} (host {note.name}): for others that is another machine, and "
                f"{first} is not on rank 0's host; give an address that the others reach, or none"
            )
    addresses = [given[0]] if given is not None else _offered([members[rank] for rank in elsewhere])
    if not addresses:
        raise Unreachable(
            f"rank 0's host {members[0].name} has no address but loopback, for {first}; {_HINT}"
        )
    load_credentials(settings, addresses[0])  # before the others try: without a key they could not come
    with answering(settings.bind_host or "*") as (port, token):
        offer = _Note(machine=members[0].machine, addresses=tuple(addresses), port=port, token=token)
        notes.write("offer/0", offer)
        reached = notes.read("reached", (rank for rank in members if rank))
    common = [address for address in addresses if all(address in note.addresses for note in reached.values())]
    if common:
        return common[0]
    texts = [
        f"rank {rank} (host {note.name}) reaches {' and '.join(note.addresses) or 'none'}"
        for rank, note in sorted(reached.items(), key=lambda item: (len(item[1].addresses), item[0]))
    ]
    raise Unreachable(
        f"no address of rank 0's host {members[0].name} can be reached by all ranks: it has "
        f"{', '.join(addresses)}{'' if given is None else f' ({given[1]})'}; {', '.join(texts[:8])}; {_HINT}"
    )


def _offered(others: Sequence[_Note]) -> list[str]:
    """Return the addresses of this host, the likeliest first: at which others find the store, if it is here;
    from which this host reaches it, if it is not; then the others.
    """
    ours = own_addresses()
    stores = dict.fromkeys(address for note in others for address in note.addresses)
    towards = [address if address in ours else source_towards(address) for address in stores]
    return list(dict.fromkeys([*(address for address in towards if address in ours), *ours]))


@contextlib.contextmanager
def answering(host: str) -> Iterator[tuple[int, bytes]]:
    """Answer everybody who connects with a token, meanwhile; yield the port and the token."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    listener = tcp_listener(host)

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # it has been shut down
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(_SLICE_S)  # a few bytes never wait
                client.sendall(token)

    thread = threading.Thread(target=answer, name="netstorm-answering", daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1]), token
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a client
        thread.join()
        listener.close()


def reachable(addresses: Sequence[str], port: int, token: bytes, limit_s: float) -> list[str]:
    """Return at which of these addresses the process answers that has the token. All are tried at once."""
    answered: set[str] = set()
    heard: dict[str, bytes] = dict.fromkeys(addresses, b"")
    deadline = clock.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):  # without this family, or without a route
                client = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect((address, port))
                waiting.register(client, selectors.EVENT_READ, address)
        while waiting.get_map() and (left := deadline - clock.monotonic()) > 0:
            for key, _ in waiting.select(left):
                address, tried = key.data, key.fileobj
                assert isinstance(tried, socket.socket)
                try:
                    got = tried.recv(len(token))
                except OSError:
                    got = b""
                heard[address] += got
                if heard[address] == token:
                    answered.add(address)
                    deadline = min(deadline, clock.monotonic() + _LATER_S)
                if not got or len(heard[address]) >= len(token):
                    waiting.unregister(tried)
    return [address for address in addresses if address in answered]


_log = logging.getLogger(__name__)

_NEWEST_TESTED: Final = (2, 14)
"""Of PyTorch's releases."""


class _Job:
    """The job that this process is in, and its groups."""

    def __init__(self, runtime: Runtime, ranks: tuple[int, ...], scheduler: SchedulerChild | None) -> None:
        self.runtime: Final = runtime
        self.ranks: Final = ranks
        """PyTorch's ranks, by rank in the job."""
        self.namespace: Final = runtime.open_namespace()
        self.thread: Final = CompletionThread("netstorm-completion")
        self.positions: Final = CallPositions(later=runtime.node.needs_state)
        self.groups = 0
        self.made: Final[Counter[str]] = Counter()
        """How many groups of a name there were: PyTorch gives the name of a group that is no more to another
        one of the same ranks (`use_local_synchronization`). All members have made equally many.
        """
        self.before_leaving: Final[list[Callable[[], None]]] = []
        self._scheduler: Final = scheduler

    def close(self) -> None:
        """Clear up when the node has left the job."""
        self.thread.close()
        if self._scheduler is not None:
            self._scheduler.wait()


class _ProcessJobs:
    """The jobs of this process, one after the other."""

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.job: _Job | None = None


_process: Final = _ProcessJobs()


@raises_torch_errors
def create_process_group(options: Any, _: object = None) -> NetStormProcessGroup:
    """Create a group; PyTorch calls it, at every member.

    Args:
        options: PyTorch's `_DistributedBackendOptions`.

    Raises:
        NetStormError: the job does not come together, or a later group has other ranks than the first one.
    """
    let_pytorch_call_us()
    let_backward_raise_own_errors()
    if getattr(options, "enable_reconfigure", False):  # PyTorch 2.14 has it
        from netstorm.frontends.torch.reconfigure import ReconfigurableGroup  # imports a scheduler

        return ReconfigurableGroup(
            options.store, options.group_rank, options.group_size, options.group_id, options.timeout
        )
    within: Any = getattr(torch.distributed.group.WORLD, "within", None)  # of a reconfigurable one
    if within is not None:
        group: NetStormProcessGroup = within(options)
        return group
    with _process.lock:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        job = _process.job
        if job is None:
            job = _process.job = _join(options.store, ranks, options.group_rank, options.timeout)
        outside = sorted(set(ranks) - set(job.ranks))
        if outside:
            text = (
                f"a NetStorm group of ranks {list(ranks)}: ranks {outside} are not in the first NetStorm "
                f"group, of ranks {list(job.ranks)}, which rank {ranks[options.group_rank]} is still in; "
                "create a group of all ranks first: init_process_group('netstorm'), or "
                "new_group(backend='netstorm')"
            )
            refuse(options.store, options.group_rank, text)  # the others may wait for this one
            raise UsageError(text)
        job.made[options.group_id] += 1
        again = job.made[options.group_id]
        member = ProcessGroupMember(
            options.group_id if again == 1 else f"{options.group_id} ({again})",
            [job.ranks.index(rank) for rank in ranks],
            runtime=job.runtime,
            namespace=job.namespace,
            thread=job.thread,
            timeout=options.timeout,
            positions=job.positions,
        )
        job.groups += 1
        return NetStormProcessGroup(member, lambda: _group_closed(job), options.store)


@raises_torch_errors
def join_before_rendezvous(
    backend: str,
    _init_method: object = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    *_: object,
    **others: object,
) -> None:
    """Join the job whose scheduler the environment names, before PyTorch's rendezvous: that waits for minutes
    for a rank that has died, and cannot say which. Takes the arguments of `init_process_group`.

    A group that has other ranks than the job, and an elastic job, join later.

    Raises:
        UsageError: the group would change its members, and the job has fixed ones.
        NetStormError: the job does not come together.
    """
    if others.get("enable_reconfigure"):
        raise UsageError(
            "init_process_group(enable_reconfigure=True) under `netstorm launch`, which starts jobs of fixed "
            "or elastic members: start the processes with torchrun or by hand, or leave it out"
        )
    settings = Settings.from_environment()
    named = settings.source("rank") != "default" and settings.source("num_workers") != "default"
    is_the_job = rank in {-1, settings.rank} and world_size in {-1, settings.num_workers}
    with _process.lock:
        if _process.job is not None or not (named and is_the_job) or settings.elastic or others.get("_ranks"):
            return
        if settings.source("wait_timeout_s") == "default":
            settings = settings.changed(wait_timeout_s=(timeout or default_timeout(backend)).total_seconds())
        runtime_of_this_process(settings, framework="PyTorch")


def runtime_of_job() -> Runtime | None:
    """Return the runtime of the job that this process is in; None: it is in none."""
    with _process.lock:
        return None if _process.job is None else _process.job.runtime


def before_leaving(function: Callable[[], None]) -> None:
    """Have `function` called before this process leaves the job that it is in, with its last group."""
    with _process.lock:
        if _process.job is not None:
            _process.job.before_leaving.append(function)


def _group_closed(job: _Job) -> None:
    """Leave the job with the last group; the node goes on to forward for the others."""
    with _process.lock:
        job.groups -= 1
        if job.groups == 0 and _process.job is job:
            for function in job.before_leaving:
                function()
            _process.job = None
            leave_job()


def untested_version(version: str) -> str | None:
    """Return what to say of a version of PyTorch that is newer than those that are tested; None: nothing."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) <= _NEWEST_TESTED:
        return None
    tested = ".".join(map(str, _NEWEST_TESTED))
    return (
        f"PyTorch {version} is newer than {tested}, with which this release of NetStorm is tested; if "
        f"something fails, try `pip install 'torch=={tested}.*'`"
    )


def _join(store: Store, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> _Job:
    if rank == 0 and (warning := untested_version(torch.__version__)):
        _log.warning("%s", warning)
    if codec_of_settings(Settings.from_environment()) is not None:
        let_models_use_it()
    settings, scheduler = _settings(store, len(ranks), rank, timeout)
    try:
        runtime = runtime_of_this_process(settings, framework="PyTorch")
    except BaseException:
        if scheduler is not None:
            scheduler.stop()
        raise
    job = _Job(runtime, ranks, scheduler)
    after_close(job.close)
    return job


def _reproducible(settings: Settings) -> Settings:
    """Return settings that ask for reproducible results, if the script does and they do not say otherwise."""
    if settings.source("reproducible") != "default" or not torch.are_deterministic_algorithms_enabled():
        return settings
    try:
        return settings.changed(reproducible=True)
    except SettingsError as error:
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise
        _log.warning("results are not reproducible: %s", error)
        return settings


def _settings(
    store: Store, size: int, rank: int, timeout: timedelta
) -> tuple[Settings, SchedulerChild | None]:
    """Return this process's settings, and the scheduler that it has started, if it has."""
    settings = _reproducible(Settings.from_environment())
    own: dict[str, object] = {"rank": rank}
    if settings.source("num_workers") == "default":
        own["num_workers"] = size
    elif settings.places != size:
        if settings.elastic:
            raise UsageError(
                f"NETSTORM_ELASTIC={settings.elastic} for a first NetStorm group of {size} ranks: expected "
                f"{settings.places}, one for each node that may come; "
                "netstorm.frontends.torch.elastic.init_process_group() makes that group"
            )
        if foreign_variable("WORLD_SIZE") != str(settings.num_workers):
            raise UsageError(
                f"DMLC_NUM_WORKER={settings.num_workers} for a first NetStorm group of {size} ranks: give "
                "both the same number, or leave DMLC_NUM_WORKER out"
            )
        own["num_workers"] = size
    if settings.source("wait_timeout_s") == "default":
        own["wait_timeout_s"] = timeout.total_seconds()
    named = {settings.source("scheduler_host"), settings.source("scheduler_port")} != {"default"}
    # The named scheduler is that of a job of all ranks. A group of some of them is a job of its own.
    if named and own.get("num_workers", settings.places) == settings.places:
        return settings.changed(**own), None
    host, port, scheduler = meet(store, rank, size, settings.changed(**own))
    return settings.changed(**own, scheduler_host=host, scheduler_port=port), scheduler
