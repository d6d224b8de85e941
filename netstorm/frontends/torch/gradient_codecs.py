"""Gradients that travel under a codec (`netstorm.compression`): DDP's by a communication hook, or by a
setting in scripts that stay unedited; DiLoCo's outer gradients.

```python
model.register_comm_hook(CodecHookState({"*.bias": "none", "*": "int8"}, model), codec_hook)
```
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm import clock
from netstorm.compression.auto import Auto
from netstorm.compression.codec import Codec, GradientPlace, Rounds
from netstorm.compression.registry import CodecRules, Description, rules_of
from netstorm.errors import UsageError
from netstorm.frontends.torch.collectives import Exchanges
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.internals import GradBucket
from netstorm.frontends.torch.member import CallWork, ProcessGroupMember, copy_back, future_of
from netstorm.frontends.torch.process_group import NetStormProcessGroup, netstorm_group
from netstorm.frontends.torch.tensors import Staged, staged
from netstorm.kvstore.calls import EncodedSum
from netstorm.kvstore.operations import Done
from netstorm.kvstore.process.group_member import after_all
from netstorm.kvstore.process.runtime import describe_compression
from netstorm.protocol.codecs import Reduction
from netstorm.settings import Settings
from netstorm.training.averages import divide_parts
from netstorm.training.codec_states import CodecStates, Parameter, SumUnit, units_of

__all__ = [
    "ENCODED",
    "VARIABLE",
    "CodecHookState",
    "Description",
    "Descriptions",
    "EncodedAverages",
    "PartOf",
    "codec_hook",
    "codec_of_settings",
    "described_codec",
    "hook_state_of",
    "let_models_use_it",
]


# Annotations are not postponed here: DDP compares those of a hook with its own classes.


# Averages of tensors over the members of a group, under codecs.

ENCODED: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Types that codecs take; those of 16 bits become float32 for it."""

Descriptions = Description | Mapping[str, Description]
"""A codec, or one for each pattern of parameters' names."""

_GROUPS_TIMEOUT: Final = timedelta(0)


class EncodedAverages:
    """Averages tensors that are made of the same parameters again and again; keeps what codecs keep of them.

    All members make the same averages in the same order, and one of a parameter has ended before its next one
    begins.
    """

    def __init__(self, member: ProcessGroupMember, codec: Descriptions, what: str) -> None:
        """Begin.

        Args:
            member: this process in the group.
            codec: of all parameters, or for each pattern of their names.
            what: is averaged, for messages.

        Raises:
            UsageError: no such codec, or a bad parameter of it.
        """
        self.rules: Final[CodecRules] = rules_of(codec)
        if any(isinstance(each, Auto) for each in self.rules.codecs):
            member.runtime.refuse_if_reproducible("the codec 'auto'")
        self._kept: Final = CodecStates()
        self._what: Final = what
        self._member: Final = member
        self._calls: Final = member.tensor_calls()
        self._exchanges: Final = Exchanges(member.rank, member.size)
        self._units: Final[dict[tuple[Parameter, ...], list[SumUnit]]] = {}
        self._has_agreed = bool(member.runtime.settings.elastic)
        """Ranks have compared their codecs. Those that join later could not."""

    def kept(self) -> dict[str, Any]:
        """Return copies of what codecs keep of each parameter, as tensors. No sum may be under way."""
        return {
            kind: {
                name: {what: torch.from_numpy(array) for what, array in arrays.items()}
                for name, arrays in named.items()
            }
            for kind, named in self._kept.saved().items()
        }

    def keep(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `kept` has returned.

        Raises:
            UsageError: it is something else.
        """
        self._kept.load(
            {
                kind: {
                    name: {what: tensor.detach().cpu().numpy() for what, tensor in tensors.items()}
                    for name, tensors in (named.items() if isinstance(named, Mapping) else ())
                }
                for kind, named in saved.items()
            }
        )

    def keep_residual(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Begin with residuals, by parameter, and nothing else."""
        self._kept.load_residual({name: rest.detach().cpu().numpy() for name, rest in residuals.items()})

    def forget_elements(self) -> None:
        """Forget what has a value for each element, such as residuals. No sum may be under way."""
        self._kept.forget_elements()

    def check(self, parameter: Parameter, dtype: torch.dtype) -> None:
        """Check that a parameter can be averaged.

        Raises:
            UsageError: no codec is for its name, or its codec cannot take its type.
        """
        is_encoded = any(unit.codec is not None for unit in units_of([parameter], self.rules))
        if is_encoded and dtype not in ENCODED:
            raise UsageError(
                f"codec {self.rules.of(parameter.name).name!r} for parameter {parameter.name!r}, which is "
                f"{dtype}: codecs take float32, float16 and bfloat16; exempt it by a rule such as "
                f"{{{parameter.name!r}: 'none', '*': …}}"
            )

    def begin(self, tensor: torch.Tensor, parameters: Sequence[Parameter], priority: int = 0) -> CallWork:
        """Begin to average a tensor over the members that contribute, in place, and return the work.

        Args:
            tensor: dense; the values of the parameters, one after the other.
            parameters: the same at all members.
            priority: larger goes first on every link.

        Raises:
            UsageError: see `check`.
        """
        units = self._units_of(tuple(parameters), tensor)
        self._member.positions.check(self._calls)
        memory = staged(tensor)
        work = self._member.work(
            f"average of {self._what}, {tensor.numel()} values", [tensor], _GROUPS_TIMEOUT
        )
        work.on_device(memory.device)
        thread = self._member.thread.for_caller()

        def ended(error: Exception | None) -> None:
            if error is None and memory.is_copy:
                thread.run(lambda: copy_back([memory], work.finish, work))
            else:
                work.finish(error)

        done = after_all(len(units) + 1, ended)
        self._compare_codecs(done)
        for unit in units:
            if unit.codec is None:
                self._begin_plain(unit, memory, priority, done)
            else:
                self._begin_encoded(unit, unit.codec, memory, priority, done)
        return work

    def _units_of(self, parameters: tuple[Parameter, ...], tensor: torch.Tensor) -> list[SumUnit]:
        units = self._units.get(parameters)
        if units is None:
            for parameter in parameters:
                self.check(parameter, tensor.dtype)
            units = self._units[parameters] = units_of(parameters, self.rules)
        return units

    def _compare_codecs(self, done: Done) -> None:
        """Have ranks compare their codecs before the first average: with others they would wait for each
        other.
        """
        if self._has_agreed:
            done(None)
            return
        self._has_agreed = True
        exchange = self._exchanges.all_reduce(torch.zeros(1), Reduction.SUM)
        text = f"average of {self._what} with codec {self.rules.fingerprint}"
        self._member.begin(msgspec.structs.replace(exchange, text=text), done)

    def _begin_plain(self, unit: SumUnit, memory: Staged, priority: int, done: Done) -> None:
        part = PartOf(memory, unit.places, memory.host.dtype)
        exchange = self._exchanges.all_reduce(part.host, Reduction.AVERAGE, priority)
        self._member.begin(exchange, done, (part,))

    def _begin_encoded(self, unit: SumUnit, codec: Codec, memory: Staged, priority: int, done: Done) -> None:
        runtime = self._member.runtime
        part = PartOf(memory, unit.places, torch.float32)
        state = self._kept.of(unit)
        total = EncodedSum(
            self._calls.keys_of(f"{unit.name} as {codec.name}", unit.shape, codec, state),
            submit=runtime.submit,
            later=runtime.computing.run,
            fail=runtime.fail,
            priority=priority,
            rule=codec.fingerprint,
        )
        place = GradientPlace(
            unit.shape, self._member.size, runtime.rank, self._kept.next_number(unit), clock.monotonic
        )

        def rounds() -> Rounds:
            part.wait_until_read()
            gradient = part.host.numpy()
            yield from codec.rounds(gradient, state, place)
            divide_parts(gradient, total)
            part.copy_back()
            self._member.record_reduced(total.contributors)
            if isinstance(codec, Auto) and (news := codec.take_news()):
                describe_compression(runtime, f"auto: {news}")

        runtime.computing.run(lambda: total.begin(rounds(), done))


def described_codec(text: str, where: str) -> Descriptions:
    """Return the codec that a text describes: its name, or JSON.

    Args:
        text: such as `int8`, `{"type": "topk", "ratio": 0.01}` or `{"*.bias": "none", "*": "int8"}`.
        where: the text is from, for messages.

    Raises:
        UsageError: it is neither, there is no such codec, or a parameter of it is wrong.
    """
    described: Any = text.strip()
    if described.startswith("{"):
        try:
            described = json.loads(described, object_pairs_hook=functools.partial(_unique, where))
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}={text!r} is not JSON: {error}") from None
    try:
        _check_descriptions(described)
        rules_of(described)
    except UsageError as error:
        raise UsageError(f"{where}={text!r}: {error}") from None
    descriptions: Descriptions = described
    return descriptions


def _check_descriptions(found: Any) -> None:
    for each in [found] if isinstance(found, str) or "type" in found else found.values():
        if not isinstance(each, (str, Mapping)):
            raise UsageError(f"{each!r} is no codec: expected a name, or its type and parameters")


def _unique(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{where}: {name!r} is there twice; one codec for each pattern")
    return dict(pairs)


# Some values of a tensor in memory of their own, as a call or a codec takes them.


class PartOf(Staged):
    """Values of several places of a tensor in a row, perhaps of another type; all of them in place if
    possible.
    """

    must_wait = True

    def __init__(self, whole: Staged, places: Sequence[slice], dtype: torch.dtype) -> None:
        """Describe the values; `wait_until_read` reads them.

        Args:
            whole: the tensor.
            places: where the values are, in the order in which they are wanted.
            dtype: in which they are wanted.
        """
        self._whole = whole
        self._values = whole.host.reshape(-1)  # a view: it is contiguous
        self._places = places
        self._write = True
        self.tensor = self._values
        self.device = None
        in_place = dtype == self._values.dtype and _all_of(self._values.numel(), places)
        elements = sum(place.stop - place.start for place in places)
        self.host = self._values if in_place else torch.empty(elements, dtype=dtype)

    def wait_until_read(self) -> None:
        """Read the values."""
        self._whole.wait_until_read()
        if self.is_copy:
            for mine, theirs in self._pairs():
                mine.copy_(theirs)

    def copy_back(self) -> None:
        """Give the values to the tensor."""
        if self.is_copy:
            for mine, theirs in self._pairs():
                theirs.copy_(mine)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mine = torch.split(self.host, [place.stop - place.start for place in self._places])
        return [(part, self._values[place]) for part, place in zip(mine, self._places, strict=True)]


def _all_of(elements: int, places: Sequence[slice]) -> bool:
    end = 0
    for place in places:
        if place.start != end:
            return False
        end = place.stop
    return end == elements


# The hook, and what a script registers it with.

Average: TypeAlias = torch.futures.Future[torch.Tensor]

Named: TypeAlias = nn.Module | Iterable[tuple[str, nn.Parameter]]


class CodecHookState:
    """What `codec_hook` is registered with.

    Each parameter's gradient is summed under its codec, and divided by the number of ranks that contributed.
    Parameters of 32,768 elements and more, and PowerSGD's matrices, are encoded one by one; the smaller ones
    of a bucket that have the same codec as one tensor. Those with codec "none" are averaged as DDP does it.

    Args:
        codec: a name such as "int8"; a mapping with `type` and parameters; or one of these for each pattern
            of parameters' names, of which the first that matches counts: `{"*.bias": "none", "*": "int8"}`.
        model: whose parameters have the names, or their names and the parameters. None: parameters have no
            names, and all the same codec.
        process_group: over which gradients are averaged, of backend netstorm; None is the default group. It
            must have the same ranks as DDP's own.

    Raises:
        UsageError: there is no such codec, a parameter of it is wrong, a parameter of the model has none or
            is of another type than float32, float16 and bfloat16, or the group is none of NetStorm's.
    """

    def __init__(
        self,
        codec: Descriptions,
        model: Named | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        group = netstorm_group(process_group, f"codec {codec!r}")
        self._averages: Final = EncodedAverages(group.member, codec, "DDP's gradients")
        self._has_names: Final = model is not None
        self._named: Final[dict[int, tuple[Parameter, nn.Parameter]]] = {}
        """By identity of the parameter, which is kept alive."""
        if model is None:
            if [*_patterns(codec)] not in ([], ["*"]):
                raise UsageError(
                    f"codec {codec!r} has patterns of parameters' names, which are not known: give the "
                    "model, too"
                )
            return
        for name, parameter in _parameters(model):
            if parameter.requires_grad:
                described = Parameter(name, tuple(parameter.shape))
                self._averages.check(described, parameter.dtype)
                self._named[id(parameter)] = described, parameter

    @property
    def fingerprint(self) -> str:
        """Which parameters have which codec; all ranks must have the same."""
        return self._averages.rules.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what is kept of this rank's gradients, for a checkpoint. Ranks differ in it: each
        saves its own. No backward pass may be under way.
        """
        return self._averages.kept()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned.

        Raises:
            UsageError: it is something else, or of parameters that the model does not have.
        """
        known = {described.name: described for described, _ in self._named.values()}
        for name, kept in saved.get("parameters", {}).items():
            if self._has_names and name not in known:
                raise UsageError(
                    f"the checkpoint has gradients of {name!r}, which is no parameter of the model"
                )
            for what, values in kept.items():
                if name in known and values.dim() and values.numel() != known[name].elements:
                    raise UsageError(
                        f"the checkpoint's {what} of {name!r} has {values.numel()} elements, the model's "
                        f"parameter {known[name].elements}: load a checkpoint of the same model"
                    )
        self._averages.keep(saved)

    def average(self, bucket: GradBucket) -> CallWork:
        """Begin to average a bucket, in place; `codec_hook` calls it."""
        parameters = [self._described(parameter) for parameter in bucket.parameters()]
        return self._averages.begin(bucket.buffer(), parameters, bucket.index())

    def _described(self, parameter: torch.Tensor) -> Parameter:
        named = self._named.get(id(parameter))
        if named is not None:
            return named[0]
        if self._has_names:
            raise UsageError(
                f"DDP has a parameter of shape {tuple(parameter.shape)} that the model of CodecHookState "
                "does not have: give it the same model"
            )
        described = Parameter(f"parameter {len(self._named)}", tuple(parameter.shape))
        self._named[id(parameter)] = described, cast("nn.Parameter", parameter)
        return described


@raises_torch_errors
def _begin(state: CodecHookState, bucket: GradBucket) -> CallWork:
    return state.average(bucket)


def codec_hook(state: CodecHookState, bucket: GradBucket) -> Average:
    """Average a bucket under `state`'s codecs, in place, and return at once.

    All ranks get the same bits. A later bucket has gradients of earlier layers, which the next forward pass
    needs first: it overtakes the buckets before it.
    """
    return future_of(_begin(state, bucket), bucket.buffer())


def _patterns(codec: Descriptions) -> Iterable[str]:
    """Return the patterns of parameters' names that a description has."""
    return () if isinstance(codec, str) or "type" in codec else codec


def _parameters(model: Named) -> Iterable[tuple[str, nn.Parameter]]:
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return model.named_parameters() if isinstance(model, nn.Module) else model


# NETSTORM_GRADIENT_CODEC: a codec for the gradients of scripts that stay unedited.
#
# Only DDP's own sums have it. They are told from others by DDP itself: each model over a NetStorm group gets
# `codec_hook` when it is made, which DDP calls for its buckets and nothing else. So the names of the
# parameters are known, too, and other calls of `all_reduce` stay exact.

VARIABLE: Final = "NETSTORM_GRADIENT_CODEC"

_STATE: Final = "netstorm_codec_hook_state"
"""Attribute of a model that has got the codec of the settings."""


def codec_of_settings(settings: Settings) -> Descriptions | None:
    """Return the codec that the settings describe; None: they describe none.

    Raises:
        UsageError: it is none.
    """
    return described_codec(settings.gradient_codec, VARIABLE) if settings.gradient_codec else None


def hook_state_of(model: DistributedDataParallel) -> CodecHookState | None:
    """Return the state of the hook that a model has by the setting, to save it; None: it has none."""
    state: CodecHookState | None = getattr(model, _STATE, None)
    return state


def let_models_use_it() -> None:
    """Have DDP give each model over a NetStorm group the codec of the settings. Twice does no harm."""
    original = DistributedDataParallel.__init__
    if hasattr(original, "of_netstorm"):
        return

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        _give_codec(self)

    init.of_netstorm = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _give_codec(model: DistributedDataParallel) -> None:
    group = model.process_group
    if not isinstance(group, NetStormProcessGroup):
        return
    codec = codec_of_settings(group.member.runtime.settings)
    if codec is None:
        return
    state = CodecHookState(codec, model, group)
    model.register_comm_hook(state, codec_hook)
    setattr(model, _STATE, state)

    def refuse(*_: object, **__: object) -> None:
        raise UsageError(
            f"this model has the codec {state.fingerprint} by {VARIABLE}, and DDP takes one hook only: unset "
            "the variable, or leave the script's own hook out"
        )

    model.register_comm_hook = refuse  # type: ignore[method-assign]
