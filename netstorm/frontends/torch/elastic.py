"""Elastic jobs of PyTorch: ranks die, come back and join while the others train on.

    from netstorm.frontends.torch import elastic

    elastic.init_process_group()
    model = elastic.data_parallel(model)
    sampler = elastic.ElasticSampler(len(samples), batch_size=32)
    state = elastic.ElasticState(model=model, optimizer=optimizer, sampler=sampler)
    while state.step() < steps:
        inputs, labels = samples[sampler.take()]
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()

Without `NETSTORM_ELASTIC=MIN:MAX` the same program runs as any other, and the loss of a rank ends the job.
"""

import copy
import logging
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.checkpoint.format import digest, pack, unpack
from netstorm.errors import Disagreement, NodeLost, UsageError
from netstorm.frontends.torch.checkpoint import TorchTensors
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.gradient_codecs import CodecHookState, Descriptions, codec_hook, hook_state_of
from netstorm.frontends.torch.internals import GradBucket, HashStore, import_compiler
from netstorm.frontends.torch.member import CallWork, future_of
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.frontends.torch.startup import before_leaving
from netstorm.kvstore.calls import Position
from netstorm.kvstore.process.elastic import fetch_state, offer_state, wait_for_enough_nodes
from netstorm.kvstore.process.runtime import before_finish, runtime_of_this_process
from netstorm.protocol.frames import ranks_in
from netstorm.settings import Settings, foreign_variable
from netstorm.training.samplers import Permutation, SampleShares
from netstorm.training.votes import Vote, count_votes

__all__ = [
    "ElasticSampler",
    "ElasticState",
    "StateEntries",
    "average_hook",
    "contributors",
    "data_parallel",
    "group_of_all_ranks",
    "init_process_group",
    "is_newcomer",
    "live_ranks",
]


# Joins an elastic job, at its begin or later. PyTorch's rendezvous waits for ranks that may never come.

_TIMEOUT: Final = timedelta(minutes=30)
"""PyTorch's own, for process groups on CPUs."""


@raises_torch_errors
def init_process_group(timeout: timedelta = _TIMEOUT) -> None:
    """Join the job, and make the default process group.

    In an elastic job (NETSTORM_ELASTIC=MIN:MAX) the group has MAX ranks, whether they have come or not. This
    process's rank is that of NETSTORM_RANK or RANK; without both, or with NETSTORM_RANK=-1, the lowest that
    is free. Groups made by `new_group` have NetStorm's backend.

    In any other job this is `torch.distributed.init_process_group("netstorm")`.

    Args:
        timeout: of calls, and of the wait until the job begins.

    Raises:
        UsageError: an elastic job without a scheduler that its environment names.
        NetStormError: the job does not come together, or has no place left.
    """
    settings = Settings.from_environment()
    if settings.elastic_range is None:
        dist.init_process_group(NAME, timeout=timeout)
        return
    if {settings.source("scheduler_host"), settings.source("scheduler_port")} == {"default"}:
        raise UsageError(
            f"NETSTORM_ELASTIC={settings.elastic}, and no scheduler is named, which must outlive every rank: "
            "start the job with `netstorm launch`, or name one in DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
        )
    # Seconds of imports, when DDP is made. Before it joins: results of the others then wait for this process.
    import_compiler()
    changed: dict[str, object] = {"rank": _rank(settings)}
    if settings.source("wait_timeout_s") == "default":
        changed["wait_timeout_s"] = timeout.total_seconds()
    runtime = runtime_of_this_process(settings.changed(**changed), framework="PyTorch")
    # What PyTorch keeps in a store dies with the rank that holds it. NetStorm's groups need none.
    dist.init_process_group(
        NAME, store=HashStore(), rank=runtime.rank, world_size=runtime.size, timeout=timeout
    )


def _rank(settings: Settings) -> int:
    text = foreign_variable("RANK")
    if settings.source("rank") != "default" or not text:
        return settings.rank
    if not (text.isascii() and text.isdecimal() and int(text) < settings.places):
        raise UsageError(
            f"RANK={text}: expected a number from 0 to {settings.places - 1}, since "
            f"NETSTORM_ELASTIC={settings.elastic}; leave it out for any rank that is free"
        )
    return int(text)


# Who is in an elastic job, and whose values a result has.


@raises_torch_errors
def live_ranks() -> tuple[int, ...]:
    """Return the ranks that are in the job now, ascending, as this process has last heard.

    Ranks hear of a change at different times: what all must decide alike has to depend on results
    (`contributors`), not on this.
    """
    return group_of_all_ranks().member.runtime.node.live.ranks


@raises_torch_errors
def is_newcomer() -> bool:
    """Return whether this process has joined a job that had begun, and does not have its state yet.

    It may make no collective call before `ElasticState.step()`.
    """
    return group_of_all_ranks().member.runtime.node.needs_state


@raises_torch_errors
def contributors(work: dist.Work) -> frozenset[int]:
    """Return the ranks, within the group, whose values are in all parts of a result; the same at all ranks.

    A rank that has left while the call was under way may be in some parts. An average of a part is one over
    those who are in it.

    Args:
        work: of a collective call with `async_op=True`, that has ended.

    Raises:
        UsageError: it has not ended, or is none of NetStorm's.
    """
    if not isinstance(work, CallWork) or work.contributors is None:
        raise UsageError(
            f"contributors({work!r}): expected the work of a collective call over the netstorm backend that "
            "has ended; all_reduce(tensor, async_op=True) returns it, and work.wait() waits for its end"
        )
    return work.contributors


def group_of_all_ranks() -> NetStormProcessGroup:
    """Return the default group.

    Raises:
        UsageError: there is none, or it is another backend's.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, NetStormProcessGroup):
        raise UsageError(
            "the default process group is not NetStorm's: call "
            "netstorm.frontends.torch.elastic.init_process_group() first"
        )
    return group


# DistributedDataParallel in jobs that ranks may leave and join.

# Annotations are not postponed here: DDP compares those of a hook with its own classes.


Average: TypeAlias = torch.futures.Future[torch.Tensor]

_FIXED = {
    "init_sync": "a newcomer would wait for calls that the others have made long ago; ElasticState gives all "
    "ranks the same values",
    "broadcast_buffers": "rank 0 may not be in the job; each rank has its own buffers",
    "forward_sync_buffers": "rank 0 may not be in the job; each rank has its own buffers",
    "find_unused_parameters": "without it, DDP chooses other buckets after the first step, and a newcomer's "
    "would differ from those of the others",
    "static_graph": "with it, DDP chooses other buckets after the first step, and a newcomer's would differ "
    "from those of the others",
}


def data_parallel(
    module: nn.Module, *, codec: Descriptions | None = None, **options: Any
) -> DistributedDataParallel:
    """Return a module whose gradients are averaged over the ranks that are in the job.

    It is PyTorch's DistributedDataParallel, made so that a rank which joins later makes the same calls as the
    others: nothing is exchanged at its construction, buckets never change, and each bucket's average is one
    over those who contributed. Buffers, such as BatchNorm's, stay each rank's own. Every step also sums one
    number for each parameter, which says whether it was used.

    PyTorch warns once that `find_unused_parameters` may be turned off. It may not: see above.

    Args:
        module: with the same parameters at all ranks; `ElasticState` makes their values equal.
        codec: how gradients travel, as `CodecHookState` takes it; None: as they are, or by
            NETSTORM_GRADIENT_CODEC. What a codec keeps of a rank's gradients goes with the rank.
        options: of DistributedDataParallel, apart from those that have to be as they are.

    Raises:
        UsageError: one of those, or a wrong codec.
    """
    for name, value in options.items():
        if name in _FIXED:
            raise UsageError(f"{name}={value!r}: leave it out, since {_FIXED[name]}")
    model = DistributedDataParallel(
        module,
        init_sync=False,
        forward_sync_buffers=False,
        find_unused_parameters=True,
        **{"gradient_as_bucket_view": True, **options},
    )
    if codec is not None:
        state = CodecHookState(codec, module, options.get("process_group"))
        model.register_comm_hook(state, codec_hook)
    elif hook_state_of(model) is None:
        model.register_comm_hook(options.get("process_group"), average_hook)
    return model


def average_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Average:
    """Average a bucket over the ranks that contribute to it, in place, and return at once.

    A later bucket has gradients of earlier layers, which the next forward pass needs first: it overtakes the
    buckets before it.
    """
    gradients = bucket.buffer()
    group = process_group or dist.group.WORLD
    if isinstance(group, NetStormProcessGroup):
        work: Any = group.allreduce_with_priority(gradients, bucket.index(), average=True)
    else:
        gradients.div_(dist.get_world_size(process_group))
        work = dist.all_reduce(gradients, group=group, async_op=True)
    return future_of(work, gradients)


class ElasticSampler(SampleShares):
    """Gives each rank its batches, in an order that all ranks know: that of PyTorch's generator.

    Every epoch has a permutation of all samples. Each rank that contributed to the last step gets the next
    `batch_size` of them. All ranks agree on who did, so no sample is given twice, and the position is the
    same at all ranks whoever comes or goes. A rank that contributes for the first time trains on a batch that
    another one has, too. Samples at the end of an epoch that are too few for a batch of all ranks are left
    out, as with `drop_last`.

    A rank that has just joined repeats steps of the others, and its gradients do not count. Until it has
    caught up it gets small batches, so that it takes less time for a step than they do.

    As the `batch_sampler` of a DataLoader it needs `num_workers=0`: workers fetch batches in advance, for
    ranks that may be gone by then.

    Args:
        length: number of samples.
        batch_size: of one rank.
        seed: of the permutations, the same at all ranks.
        shuffle: if not, samples come in their order.
        catch_up_size: of a rank that is catching up; 2, since BatchNorm refuses a single sample.

    Attributes:
        epoch: of the next batch, from 0.
        position: samples of this epoch that were given to any rank.
    """

    def _permutation(self, seed: int) -> Permutation:
        order: Permutation = torch.randperm(
            self._length, generator=torch.Generator().manual_seed(seed)
        ).numpy()
        return order


# What an `ElasticState` holds: objects with state dictionaries, and plain values.


class StateEntries:
    """The parts of a program's state, by name."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        """Hold some.

        Raises:
            UsageError: there are none, or one saves a state and does not load it.
        """
        if not entries:
            raise UsageError("ElasticState(): name what it holds, such as model=model, optimizer=optimizer")
        for name, entry in entries.items():
            if _has_state(entry) and not callable(getattr(entry, "load_state_dict", None)):
                raise UsageError(
                    f"{name}: a {type(entry).__name__} has state_dict(), and no load_state_dict()"
                )
        self._entries: Final = dict(entries)

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._entries or _has_state(self._entries[name]):
            plain = [known for known, entry in self._entries.items() if not _has_state(entry)]
            raise UsageError(f"{name!r} is no plain value of this state: it has {plain or 'none'}")
        self._entries[name] = value

    def whole(self) -> dict[str, Any]:
        """Return everything, as a tree of tensors and plain values."""
        return {
            name: entry.state_dict() if _has_state(entry) else entry for name, entry in self._entries.items()
        }

    def compared(self) -> dict[str, Any]:
        """Return what must be equal at all ranks: everything but the buffers of modules."""
        compared = self.whole()
        for name, entry in self._entries.items():
            if isinstance(entry, nn.Module):
                buffers = {path for path, _ in entry.named_buffers()}
                compared[name] = {
                    path: value for path, value in compared[name].items() if path not in buffers
                }
        return compared

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what another rank's `whole` has returned.

        Raises:
            UsageError: that rank's program holds something else.
        """
        if set(state) != set(self._entries):
            raise UsageError(
                f"another rank's ElasticState holds {sorted(state)}, and this one's {sorted(self._entries)}: "
                "all ranks must run the same program"
            )
        for name, value in state.items():
            entry = self._entries[name]
            if isinstance(entry, nn.Module):
                entry.load_state_dict(value)  # copies
            elif _has_state(entry):
                entry.load_state_dict(copy.deepcopy(value))  # optimizers keep the tensors that they get
            else:
                self._entries[name] = copy.deepcopy(value)

    def set_ranks(self, rank: int, ranks: tuple[int, ...], *, counts: bool) -> None:
        """Tell those who share samples among ranks who shares the next ones, and whether this rank counts."""
        for entry in self._entries.values():
            tell = getattr(entry, "set_ranks", None)
            if callable(tell):
                tell(rank, ranks, counts=counts)

    @property
    def samplers(self) -> list[SampleShares]:
        """Those who share samples among ranks."""
        return [entry for entry in self._entries.values() if isinstance(entry, SampleShares)]


def _has_state(entry: object) -> bool:
    return callable(getattr(entry, "state_dict", None))


# All ranks compare digests of their states; those that differ take over that of most.

_log = logging.getLogger(__name__)

_PIECE: Final = 64 * 2**20
"""Bytes of one broadcast: keys of collective calls have a largest size."""


class StateAgreement:
    """The comparisons of one program's state."""

    def __init__(self, group: NetStormProcessGroup, entries: StateEntries, *, repair: bool) -> None:
        """Compare `entries` over the ranks of a group.

        Args:
            group: of all ranks.
            entries: what is compared.
            repair: ranks that differ take over the others' state; if not, all ranks raise an error.
        """
        self._group: Final = group
        self._member: Final = group.member
        self._entries: Final = entries
        self._repair: Final = repair
        self._tensors: Final = TorchTensors()

    def reach(self, step: int, *, at_start: bool) -> tuple[int, ...]:
        """Compare the states of all ranks, and return who took part; the same at all ranks.

        Args:
            step: for messages.
            at_start: ranks may have drawn different values, so that a difference is no error.

        Raises:
            Disagreement: names the ranks whose state differs.
            NodeLost: all who had the state have left.
        """
        for _ in range(self._member.size):
            mine = digest(self._entries.compared(), self._tensors)
            digests = self._exchange(mine)
            vote = count_votes(digests)
            if not vote.differing:
                if mine != vote.digest:  # it has just joined, so it has no vote
                    raise Disagreement(
                        f"before step {step}, the state of rank {self._member.rank} differs from that of all "
                        "others: start it again; if that does not help, a step depends on the rank"
                    )
                return tuple(sorted(digests))
            if not at_start:
                self._complain(step, vote)
            try:
                content = self._send_from(vote.source)
            except NodeLost as error:  # at all ranks
                _log.warning("the states are compared once more: %s", error)
                continue
            if mine != vote.digest:
                state = unpack(content, self._tensors)
                assert isinstance(state, dict)
                self._entries.load(state)
            return tuple(sorted(digests))
        raise NodeLost(f"every rank that was to send its state before step {step} has left the job")

    def _exchange(self, mine: int) -> dict[int, int]:
        """Return the digests of all ranks that have a vote."""
        digests = torch.zeros(self._member.size, dtype=torch.int64)
        work = self._group.all_gather_single(digests, torch.tensor([mine]))
        work.wait()
        assert work.contributors is not None
        return {rank: int(digests[rank]) for rank in work.contributors}

    def _complain(self, step: int, vote: Vote) -> None:
        names = ", ".join(map(str, vote.differing))
        text = f"before step {step}, the state of rank {names} differs from that of rank {vote.source}"
        if not self._repair:
            raise Disagreement(
                f"{text}, which most have: something in a step depends on the rank; "
                "ElasticState(repair=True) would give them the others' state"
            )
        _log.warning("%s, which most have; they take it over", text)

    def _send_from(self, source: int) -> bytearray:
        mine = source == self._member.rank
        content = pack(self._entries.whole(), self._tensors) if mine else bytearray()
        length = torch.tensor([len(content)])
        dist.broadcast(length, src=source, group=self._group)
        if not mine:
            content = bytearray(int(length))
        whole = torch.frombuffer(content, dtype=torch.uint8)
        for begin in range(0, len(content), _PIECE):
            dist.broadcast(whole[begin : begin + _PIECE], src=source, group=self._group)
        return content


# The state of a program in an elastic job: newcomers get it, and all ranks keep it equal.


class ElasticState:
    """What a rank that joins later must have to train as the others do.

    Args:
        verify_every: steps between two comparisons of the states of all ranks; 0: only at the start. Each
            rank reads its whole state for that, and sends 8 bytes.
        repair: ranks whose state differs take over that of most ranks; if not, all ranks raise an error.
        entries: by name, objects with `state_dict()` and `load_state_dict()` (model, optimizer, scheduler,
            sampler), and plain values, which `state["name"]` reads and sets.

    Attributes:
        number: how many steps have begun.
        ranks: those whose values were in the last step's reductions; the same at all ranks.

    Raises:
        UsageError: the default process group is not NetStorm's; an entry that cannot be held.
    """

    @raises_torch_errors
    def __init__(self, *, verify_every: int = 100, repair: bool = True, **entries: Any) -> None:
        if verify_every < 0:
            raise UsageError(f"verify_every={verify_every}: expected 0 or more steps")
        self.number = 0
        self.ranks: tuple[int, ...] = ()
        group = group_of_all_ranks()
        self._member: Final = group.member
        self._runtime: Final = self._member.runtime
        self._entries: Final = StateEntries(entries)
        self._agreement: Final = StateAgreement(group, self._entries, repair=repair)
        self._verify_every: Final = verify_every
        self._tensors: Final = TorchTensors()
        self._begun_at: dict[str, Position] | None = None
        """Where the calls were when the last step began; None: none has begun, or this state is closed."""
        before_leaving(self.close)
        before_finish(self.close)

    def __getitem__(self, name: str) -> Any:
        """Return an entry."""
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a plain value.

        Raises:
            UsageError: there is none of that name.
        """
        self._entries[name] = value

    @raises_torch_errors
    def step(self) -> int:
        """Begin the next step, and return its number, from 0. Call it before each step, at every rank, while
        no call is under way.

        The first one gives all ranks the same state, at a newcomer that of the others. Later ones offer it to
        newcomers, which costs a copy, and wait while fewer than MIN nodes are in the job.

        Raises:
            Disagreement: the states of ranks differ, and are not to be repaired.
            WaitTimeout: fewer than MIN nodes for NETSTORM_WAIT_FOR_NODES.
            NetStormError: the job has failed.
        """
        if self._runtime.node.needs_state:
            self._fetch()
        else:
            self._record_ranks()
            if self.number == 0 or (self._verify_every and self.number % self._verify_every == 0):
                self.ranks = self._agreement.reach(self.number, at_start=self.number == 0)
        self._begun_at = self._member.positions.now()
        self._answer()
        wait_for_enough_nodes(self._runtime, self._answer)
        self._entries.set_ranks(self._member.rank, self.ranks, counts=self._runtime.node.live.contributes)
        self._member.reduced_by = None
        self.number += 1
        return self.number - 1

    @property
    def samplers(self) -> list[SampleShares]:
        """The entries that share samples among ranks."""
        return self._entries.samplers

    def close(self) -> None:
        """Leave the state to ranks that join from now on. It is called when the process group is destroyed,
        and at the program's end. Twice does no harm. After an exception, which may have come in the middle of
        a step, nothing is left.
        """
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None and self._runtime.node.live.is_elastic and sys.exc_info()[1] is None:
            has_made_calls = self._member.positions.now() != begun_at
            if has_made_calls:
                self._record_ranks()
            self._offer(self.number if has_made_calls else self.number - 1, None)

    def _record_ranks(self) -> None:
        """Take over who has contributed since the last step began."""
        bits = self._member.reduced_by
        if bits is not None and bits > 0:
            self.ranks = ranks_in(bits)

    def _fetch(self) -> None:
        snapshot = fetch_state(self._runtime)
        content = unpack(memoryview(snapshot.content), self._tensors)
        assert isinstance(content, dict)
        self._member.positions.go_on_at(msgspec.convert(content["calls"], dict[str, Position]))
        self._entries.load(content["state"])
        self.ranks = tuple(content["ranks"])
        self.number = snapshot.step

    def _answer(self) -> None:
        """Offer the state to ranks that wait for it."""
        requests = self._runtime.node.live.state_requests
        if requests:
            self._offer(self.number, requests)

    def _offer(self, step: int, requests: frozenset[int] | None) -> None:
        state = self._entries.whole()  # may make calls: DiLoCo ends the sums that are under way
        content = {
            "calls": msgspec.to_builtins(self._member.positions.now()),
            "ranks": list(self.ranks),
            "state": state,
        }
        rounds = self._member.positions.rounds()
        offer_state(self._runtime, step, pack(content, self._tensors), rounds, requests)
