"""Asynchronous training: ranks push gradients to owners, which apply each at once, and pull parameters.

`AsynchronousSGD` is SGD on owners, with delay compensation (DCASGD). No rank waits for another one.
`MixedSync` is the same between sites, whose ranks stay in step.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.torch.elastic import group_of_all_ranks
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.parameters import FlatParameters, by_kind
from netstorm.frontends.torch.ranks import SiteAverages
from netstorm.kvstore.asynchronous.blocks import block_extent
from netstorm.kvstore.calls import Sites
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.operations import UNBOUNDED, Operation, PullOperation, Pushes, PushOperation
from netstorm.kvstore.process.elastic import (
    HeldKey,
    Newcomer,
    SavingRank,
    collect_from_owners,
    wait_for_enough_nodes,
)
from netstorm.kvstore.process.runtime import Runtime, future_end, runtime_of_this_process
from netstorm.training.dcasgd import DCASGD, Floats, OwnedDCASGD, VectorState, decoded_momentum
from netstorm.training.owned_blocks import serving

__all__ = ["AsynchronousSGD", "MixedSync"]


# SGD on owners, and what a rank's training loop calls.

_NO_ANSWER: Final = "it is stopped, or too far behind for NETSTORM_STALENESS"


class AsynchronousSGD:
    """Pushes gradients to the owners of parameters, who apply each at once, and pulls the newest ones.

    ```python
    training = AsynchronousSGD(model, lr=0.05, lamda=0.04)
    for batch in batches:
        model.zero_grad()
        loss(model, batch).backward()
        training.step()
    ```

    No rank waits for another one, but for NETSTORM_STALENESS. A gradient may be late: others have changed the
    parameters since it was computed. With `lamda` it is corrected by what has changed since this rank has
    pulled (DCASGD, Zheng et al., ICML 2017). Owners keep a copy of parameters for each rank then.

    All ranks make it at the same place of the program, and begin with rank 0's parameters. In an elastic job
    parameters survive their owner, and a rank that joins later begins with the newest ones. The learning rate
    is this rank's own and may be changed at any time: it is sent with each gradient.

    Args:
        model: whose parameters are trained; those that need no gradient are not.
        lr: learning rate.
        momentum: from 0 to below 1; over corrected gradients.
        lamda: weight of the correction; 0: plain asynchronous SGD.
        weight_decay: as in `torch.optim.SGD`.
        state: begin with this, which `state_dict` has returned in an earlier job, instead of rank 0's
            parameters: all ranks give the same, from a checkpoint. A rank that joins later needs none.
            Momenta that it does not have begin with zeros.

    Raises:
        CheckpointError: `state` is of another model.
        UsageError: a value is not allowed, there is nothing to train; the default process group is not
            NetStorm's; or this rank has joined an elastic job later, and trains another model already.
        NetStormError: the job has failed.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.0,
        lamda: float = 0.04,
        weight_decay: float = 0.0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.lr = lr
        """Learning rate of the next step."""
        self._rule = DCASGD(momentum=momentum, lamda=lamda, weight_decay=weight_decay)
        if not dist.is_initialized() or NAME not in dist.get_backend():
            raise UsageError(
                "AsynchronousSGD needs a default process group of NetStorm's: call "
                "init_process_group('netstorm') first"
            )
        self._runtime = runtime_of_this_process(framework="PyTorch")
        self._runtime.refuse_if_reproducible(type(self).__name__)
        self._staleness = self._runtime.settings.staleness
        if self._staleness == 0:
            raise UsageError("NETSTORM_STALENESS=0 keeps all ranks in step: use DistributedDataParallel")
        kinds = by_kind(parameter for parameter in model.parameters() if parameter.requires_grad)
        if not kinds:
            raise UsageError(f"the model ({type(model).__name__}) has no parameters that need a gradient")
        vectors = [NamedVector(model, flat) for flat in kinds]
        self._newcomer = Newcomer(self._runtime)
        begun: list[VectorState] | list[None] = [None] * len(vectors)
        if state is not None and not self._newcomer.waits:
            begun = restore_parameters(vectors, state)
        namespace = self._runtime.open_namespace()
        self._tensors = [
            _Tensor(self._runtime, namespace, number, vector, own, rule=self._rule, newcomer=self._newcomer)
            for number, (vector, own) in enumerate(zip(vectors, begun, strict=True))
        ]
        self._namespace = namespace
        self._counts_clocks = False
        """Whether a clock is what ranks say, and not a push: for ranks that do not push."""
        self._steps = 0

    @property
    def steps(self) -> int:
        """How many steps this rank has taken."""
        return self._steps

    def step(self) -> None:
        """Push this rank's gradients, and wait for the newest parameters, which have them. In an elastic job
        wait for enough ranks first.

        Raises:
            WaitTimeout: there were too few ranks, or no answer of an owner, for too long.
            NetStormError: the job has failed.
        """
        if self._newcomer.waits:
            self._newcomer.take_part()
        wait_for_enough_nodes(self._runtime)
        self._steps += 1
        least = None if self._staleness == UNBOUNDED else self._steps - self._staleness
        begun = [tensor.push(self._rule, self.lr, clock=self._steps - 1) for tensor in self._tensors]
        if self._counts_clocks:
            self._end_clock(pushed=True)
        begun += [tensor.pull(least, counted=self._counts_clocks) for tensor in self._tensors]
        self._wait(begun)

    def _end_clock(self, *, pushed: bool) -> None:
        """Have owners know that this rank has taken its step, in which it has pushed all keys, or none."""
        namespace, clock = self._namespace, self._steps
        pushes = {tensor.key: 1 for tensor in self._tensors} if pushed else {}
        self._runtime.post(
            lambda node, _: node.asynchronous.clock(namespace, clock, pushes, whole=OwnedDCASGD.whole)
        )

    def pull(self) -> None:
        """Wait for the newest parameters, as to evaluate a model that others still train."""
        self._wait([tensor.pull(None) for tensor in self._tensors])

    @property
    def saving_rank(self) -> SavingRank | None:
        """Decides in an elastic job which rank saves; None: all ranks do, together."""
        return SavingRank(self._runtime) if self._runtime.node.live.is_elastic else None

    def state_dict(self) -> dict[str, Any]:
        """Return what owners hold, for a checkpoint: parameters, momenta and how often they were updated.

        In a job that is not elastic all ranks call this at the same place. They wait for each other, and get
        the same: all pushes before, and none after. In an elastic job each rank asks for itself. It gets at
        least its own pushes, and each block's parameters and momenta are of one moment.

        Raises:
            WaitTimeout: an owner, or a rank, does not come for too long.
            NetStormError: the job has failed.
        """
        together = self.saving_rank is None
        if together:
            self._runtime.barrier()
        keys = [(tensor.key, tensor.pushes) for tensor in self._tensors]
        held = collect_from_owners(self._runtime, keys, whole=OwnedDCASGD.whole)
        if together:
            self._runtime.barrier()
        parameters: dict[str, torch.Tensor] = {}
        momenta: dict[str, torch.Tensor] = {}
        updates = []
        for tensor, of_owners in zip(self._tensors, held, strict=True):
            values, moved, count = tensor.vector.state_of(tensor.key, of_owners)
            parameters |= values
            momenta |= moved
            updates.append(count)
        return {"parameters": parameters, "momenta": momenta, "updates": torch.tensor(updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError`: owners have begun already. Give the state to the constructor."""
        raise UsageError(
            "AsynchronousSGD takes what a checkpoint has when it is made, since owners begin to serve then: "
            "AsynchronousSGD(model, lr, state=loaded.state['training'])"
        )

    def _wait(self, futures: list[concurrent.futures.Future[None]]) -> None:
        self._runtime.wait_for_owners(futures, _NO_ANSWER)
        for tensor in self._tensors:
            tensor.take()


class _Tensor:
    """All parameters of one type on one device, as one key."""

    def __init__(
        self,
        runtime: Runtime,
        namespace: int,
        number: int,
        vector: NamedVector,
        begun: VectorState | None,
        *,
        rule: DCASGD,
        newcomer: Newcomer,
    ) -> None:
        self._runtime: Final = runtime
        self.vector: Final = vector
        self._flat: Final = vector.flat
        self.pushes: Final = Pushes()
        values = _on_host(vector.flat.read())
        self.key: Final[Key] = runtime.register(
            namespace, f"parameters {number}", values.shape, values.dtype.name
        )
        self._pulled: Final[Floats] = values
        self._gradient: Final[Floats] = np.zeros_like(values)
        if newcomer.waits:
            newcomer.begin_key(self.key)
            runtime.wait_for_owners([self.pull(None)], _NO_ANSWER)
        elif newcomer.knows(self.key):
            raise UsageError(
                "AsynchronousSGD of another model after a step, on a rank that has joined later: make all of "
                "them before the first step"
            )
        else:
            self._receive_initial()
        self.take()
        owned, thread = OwnedDCASGD(self.key, rule, begun), ComputingThread(runtime)
        serving(runtime.node, self.key, values, owned, thread)()

    def _receive_initial(self) -> None:
        """Receive rank 0's parameters, or in an elastic job those of the lowest rank that is there."""
        key, runtime, values = self.key, self._runtime, self._pulled
        elastic = runtime.node.live.is_elastic
        operation = Operation(
            key=key,
            round=key.take_round(),
            source=values if elastic or runtime.rank == 0 else None,
            destination=values,
            done=lambda _: None,
            from_lowest=elastic,
        )
        runtime.allreduce(operation)

    def push(self, rule: DCASGD, rate: float, *, clock: int) -> concurrent.futures.Future[None]:
        """Begin a push of the present gradients, after `clock` steps; they are copied first."""
        self._gradient[:] = _on_host(_gradients(self._flat))
        future, done = future_end()
        operation = PushOperation(
            key=self.key,
            number=self.pushes.take_push(),
            source=self._gradient,
            rule=rule.fingerprint,
            live=(float(rate),),
            clock=clock,
            done=done,
        )
        self._runtime.submit(operation)
        return future

    def pull(self, least: int | None, *, counted: bool = False) -> concurrent.futures.Future[None]:
        """Begin a pull; `least` clocks of all other ranks are in it: pushes, or what they have counted."""
        future, done = future_end()
        operation = PullOperation(
            key=self.key,
            number=self.pushes.take_pull(),
            pushed=self.pushes.total,
            destination=self._pulled,
            least=least,
            counted=counted,
            done=done,
        )
        self._runtime.submit(operation)
        return future

    def take(self) -> None:
        """Give the parameters what was pulled."""
        self._flat.write(torch.from_numpy(self._pulled).to(self._flat.device))


def _gradients(flat: FlatParameters) -> torch.Tensor:
    """Return the gradients as one vector, of the parameters' type; zeros where there are none."""
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in flat.parameters
    ]
    return FlatParameters(parts).read().to(flat.dtype)


def _on_host(vector: torch.Tensor) -> Floats:
    if vector.dtype not in (torch.float16, torch.float32, torch.float64):
        raise UsageError(
            f"parameters of {vector.dtype}: AsynchronousSGD trains float16, float32 and float64; convert them"
        )
    values: Floats = vector.detach().cpu().contiguous().numpy()
    return values


# Where blocks are updated.


class ComputingThread:
    """The process's thread for computing, as `UpdateThread`. An update that fails ends the job."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Final = runtime

    def call(self, function: Callable[[], None]) -> None:
        """Call a function after those before."""
        runtime = self._runtime

        def run() -> None:
            try:
                function()
            except Exception as error:
                runtime.fail(f"its update of a block has failed: {type(error).__name__}: {error}")
                raise

        runtime.computing.run(run)

    def post(self, function: Callable[[], None]) -> None:
        """Have the I/O thread call a function."""
        self._runtime.post(lambda _node, _now: function())


# Owners know nothing of names: they hold blocks of vectors. A checkpoint has tensors of the model's shapes,
# so a job of any number of ranks, with any size of blocks, can begin with it.


class NamedVector:
    """Parameters of one type on one device, by their names in the model.

    Attributes:
        flat: they.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters) -> None:
        self.flat: Final = flat
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names: Final = [names[id(parameter)] for parameter in flat.parameters]

    def state_of(
        self, key: Key, held: HeldKey
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
        """Return parameters and momenta (empty: there are none) by name, and how often most blocks have been
        updated at most, as owners hold them.
        """
        momentum, updates = np.zeros_like(held.values), 0
        has_momentum = False
        for block, data in held.states.items():
            place = block_extent(key, block, whole=OwnedDCASGD.whole)
            count, part = decoded_momentum(data, place.stop - place.start, key.dtype)
            updates = max(count, updates)
            if part is not None:
                momentum[place] = part
                has_momentum = True
        return self._divided(held.values), self._divided(momentum) if has_momentum else {}, updates

    def begun(self, state: Mapping[str, Any], place: int) -> VectorState:
        """Return what a saved state has of this vector, which is at `place` among all of the model.

        Raises:
            CheckpointError: it is of another model.
        """
        momenta, updates = state["momenta"], state["updates"]
        momentum = self.gathered(momenta).numpy() if momenta else None
        return VectorState(momentum, int(updates[place]) if place < len(updates) else 0)

    def gathered(self, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Return tensors by name as one vector, on the CPU.

        Raises:
            CheckpointError: they are of another model.
        """
        members = zip(self._names, self.flat.parameters, strict=True)
        return FlatParameters([_tensor(tensors, name, parameter) for name, parameter in members]).read().cpu()

    def _divided(self, vector: Array) -> dict[str, torch.Tensor]:
        shapes = self.flat.shapes
        parts = torch.split(torch.from_numpy(vector), [int(np.prod(shape, dtype=int)) for shape in shapes])
        return {
            name: part.reshape(shape) for name, part, shape in zip(self._names, parts, shapes, strict=True)
        }


def restore_parameters(vectors: Sequence[NamedVector], state: Mapping[str, Any]) -> list[VectorState]:
    """Give the model the parameters of a saved state; return what else it has of each vector.

    Raises:
        CheckpointError: it is no state of `AsynchronousSGD`, or one of another model; the model is unchanged.
    """
    if not {"parameters", "momenta", "updates"} <= state.keys():
        raise CheckpointError(
            "state= is none of AsynchronousSGD's: give what checkpoint.load has returned of an object of "
            "that class, such as loaded.state['training']"
        )
    values = [vector.gathered(state["parameters"]) for vector in vectors]
    begun = [vector.begun(state, place) for place, vector in enumerate(vectors)]
    for vector, vector_values in zip(vectors, values, strict=True):
        vector.flat.write(vector_values.to(vector.flat.device))
    return begun


def _tensor(tensors: Mapping[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    saved = tensors.get(name)
    if not isinstance(saved, torch.Tensor) or (saved.shape, saved.dtype) != (like.shape, like.dtype):
        form = "nothing" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
        raise CheckpointError(
            f"the checkpoint has {form} for parameter {name!r}, which is {like.dtype} {tuple(like.shape)}: "
            "it is of another model"
        )
    return saved


# MixedSync: synchronous within a site, asynchronous between sites (GeoMX).


class _FixedSite:
    """The site as a process group. It does what `SiteAverages` does in elastic jobs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Final = group

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self._group))

    @property
    def leader(self) -> int:
        return dist.get_global_rank(self._group, 0)

    def average(self, vectors: Sequence[torch.Tensor]) -> None:
        for vector in vectors:
            vector.mul_(1.0 / dist.get_world_size(self._group))
            dist.all_reduce(vector, group=self._group)

    def share(self, vectors: Sequence[torch.Tensor]) -> bool:
        for vector in vectors:
            dist.broadcast(vector, src=self.leader, group=self._group)
        return True


class MixedSync(AsynchronousSGD):
    """Averages gradients over a site, and trains asynchronously with those averages.

    One rank of each site, the leader, pushes the site's average to the owners and pulls; the others get the
    parameters from it. So the ranks of a site have the same bits after each step, and take steps together. No
    site waits for another one. A site counts as one worker, whatever number of ranks it has.

    Sites are those of NETSTORM_SITE, or hosts. See `AsynchronousSGD` for what else holds. All ranks make it
    at the same place of the program, because it makes process groups. The leader's learning rate counts.
    NETSTORM_STALENESS bounds how many steps a site may be ahead of the slowest one.

    In an elastic job a site goes on without ranks that have left; if the leader has, the next one leads, and
    that step's average of the site may be lost with it. A rank that joins later is a site of its own.

    Args:
        model: as of `AsynchronousSGD`, like the other arguments.
        lr: learning rate.
        site_group: the ranks of this rank's site, over any backend; None: NetStorm's groups of the sites.

    Raises:
        UsageError: as `AsynchronousSGD`; also `site_group` in an elastic job, or one without this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.0,
        lamda: float = 0.04,
        weight_decay: float = 0.0,
        site_group: dist.ProcessGroup | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, lr, momentum=momentum, lamda=lamda, weight_decay=weight_decay, state=state)
        runtime = self._runtime
        # Ranks that are no leaders push nothing, so their pushes cannot be their clocks.
        self._counts_clocks = runtime.settings.staleness != UNBOUNDED
        self._site: _FixedSite | SiteAverages
        if not runtime.node.live.is_elastic:
            sites = Sites.of(runtime.node.members, runtime.rank)
            self._site = _FixedSite(_group_of_site(sites, site_group))
        elif site_group is None:
            vectors = [(tensor.vector.flat.size, tensor.vector.flat.dtype) for tensor in self._tensors]
            member = group_of_all_ranks().member
            self._site = SiteAverages(member, vectors, is_newcomer=self._newcomer.waits)
        else:
            raise UsageError(
                "site_group= in an elastic job (NETSTORM_ELASTIC): leave it out, ranks come and go"
            )
        self._flat = [tensor.vector.flat for tensor in self._tensors]

    @property
    def is_leader(self) -> bool:
        """Whether this rank pushes and pulls for its site."""
        return self._site.leader == self._runtime.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's site; in an elastic job those that are left of it."""
        return self._site.ranks

    def step(self) -> None:
        """Average gradients over the site; its leader pushes them and pulls. Wait for the parameters."""
        led = self.is_leader
        gradients = [_gradients(flat) for flat in self._flat]
        self._site.average(gradients)
        for flat, average in zip(self._flat, gradients, strict=True):
            flat.set_gradients(average)
        if self.is_leader:
            if not led:
                super().pull()  # so owners know from which parameters this rank goes on
            super().step()
        else:
            self._steps += 1
            if self._counts_clocks:
                self._end_clock(pushed=False)
        self._share()

    def pull(self) -> None:
        """Wait for the newest parameters; all ranks of the site must call it."""
        if self.is_leader:
            super().pull()
        self._share()

    def _share(self) -> None:
        """Give the site the leader's parameters."""
        while True:
            values = [flat.read() for flat in self._flat]
            if self._site.share(values):
                break
            if self.is_leader:
                super().pull()
        for flat, vector in zip(self._flat, values, strict=True):
            flat.write(vector)


def _group_of_site(sites: Sites, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if given is not None:
        if dist.get_rank(given) < 0:
            raise UsageError(
                f"site_group: rank {dist.get_rank()} is not in it; give the group of its own site"
            )
        return given
    groups = [dist.new_group(list(ranks), backend=NAME) for ranks in sites.ranks]
    return cast("dist.ProcessGroup", groups[sites.mine])
