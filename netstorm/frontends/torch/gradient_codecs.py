"""Gradients that travel under a codec (`netstorm.compression`): DDP's by a communication hook, or by a
setting in scripts that stay unedited; DiLoCo's outer gradients.

```python
model.register_comm_hook(CodecHookState({"*.bias": "none", "*": "int8"}, model), codec_hook)
```
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, which type checkers do not see
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import UsageError
from netstorm.frontends.torch.encoded_averages import Descriptions, EncodedAverages, described_codec
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.member import CallWork
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.settings import Settings
from netstorm.training.codec_states import Parameter

__all__ = [
    "VARIABLE",
    "CodecHookState",
    "codec_hook",
    "codec_of_settings",
    "hook_state_of",
    "let_models_use_it",
]


# Annotations are not postponed here: DDP compares those of a hook with its own classes.


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
        group = process_group or dist.group.WORLD
        if not isinstance(group, NetStormProcessGroup):
            raise UsageError(
                f"codec {codec!r} over a group of type {type(group).__name__}: expected one of backend "
                "netstorm, as torch.distributed.new_group(backend='netstorm') makes"
            )
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
        found = self._named.get(id(parameter))
        if found is not None:
            return found[0]
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
    needs
    first: it overtakes the buckets before it.
    """
    gradients = bucket.buffer()

    def averaged(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what the average has failed with
        return gradients

    return cast("Average", _begin(state, bucket).get_future().then(averaged))


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
