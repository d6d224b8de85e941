"""NETSTORM_GRADIENT_CODEC: a codec for the gradients of scripts that stay unedited.

Only DDP's own sums have it. They are told from others by DDP itself: each model over a NetStorm group gets
`codec_hook` when it is made, which DDP calls for its buckets and nothing else. So the names of the parameters
are known, too, and other calls of `all_reduce` stay exact.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import UsageError
from netstorm.frontends.torch.gradient_codecs.averages import Descriptions, described_codec
from netstorm.frontends.torch.gradient_codecs.hook import CodecHookState, codec_hook
from netstorm.frontends.torch.process_group.group import NetStormProcessGroup
from netstorm.settings import Settings

__all__ = ["VARIABLE", "codec_of_settings", "hook_state_of", "let_models_use_it"]

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
