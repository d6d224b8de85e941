"""One fragment of a model: its global parameters, and the average that brings them forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.codecs import CodecOf, Encoded, Exchange, copied
from netstorm.frontends.torch.local_updates.errors import NonFiniteUpdate
from netstorm.frontends.torch.local_updates.parameters import FlatParameters, by_kind, own_gradients
from netstorm.frontends.torch.local_updates.ranks import Ranks

__all__ = ["Fragment", "accumulator_type", "check_finite"]


class Fragment:
    """Global parameters of some of a model's parameters, one vector for each type and device.

    Global parameters have the same bits at all ranks. Local ones are the model's, which the rank trains.

    Args:
        name: for messages.
        parameters: what is synchronised, by a name that no other fragment has.
        outer_optimizer: brings the global parameters forward; it is one over the model's own parameters.
        alpha: weight of the local parameters when an update is applied.
        codec: makes what averages one vector.
        ranks: whom to average over.
    """

    def __init__(
        self,
        *,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        outer_optimizer: Optimizer,
        alpha: float,
        codec: CodecOf,
        ranks: Ranks,
    ) -> None:
        self.name = name
        self.flat = by_kind(parameters.values())
        self._outer = outer_optimizer
        self._alpha = alpha
        self._ranks = ranks
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._codecs = [codec(flat, [names[id(each)] for each in flat.parameters]) for flat in self.flat]
        self._global: list[torch.Tensor] = []
        self.remember()
        self._exchanges: list[Exchange] = []
        self._averages: list[torch.Tensor] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a sum has begun and has not been applied."""
        return bool(self._exchanges) or self._averages is not None

    @property
    def codec_name(self) -> str:
        """What ranks compare."""
        return self._codecs[0].name

    def remember(self) -> None:
        """Make the local parameters the global ones; they must be the same at all ranks."""
        self._global = [flat.read() for flat in self.flat]

    def write_global(self) -> None:
        """Make the global parameters the local ones."""
        for flat, values in zip(self.flat, self._global, strict=True):
            flat.write(values)

    def begin(self) -> None:
        """Begin to average the outer gradient: global minus local parameters, as they are now."""
        for flat, start, codec in zip(self.flat, self._global, self._codecs, strict=True):
            wide = accumulator_type(flat.dtype)
            update = flat.read().to(wide).neg_().add_(start)  # in place: new memory costs more than sums
            self._exchanges.append(Exchange(codec, update, self._ranks))

    def advance(self) -> None:
        """Begin the average's next collective, if its codec takes several."""
        for exchange in self._exchanges:
            exchange.advance()

    def apply(self) -> None:
        """Wait for the average, take an outer step, and merge it into the local parameters.

        Raises:
            NonFiniteUpdate: the average is not finite. Neither global nor local parameters have changed.
        """
        averages = self._finished()
        self.drop()
        check_finite(averages, f"the outer gradient of {self.name}", self.flat)
        trained = [flat.read() for flat in self.flat] if self._alpha else []
        self.write_global()
        with own_gradients(self._outer):
            for flat, average in zip(self.flat, averages, strict=True):
                flat.set_gradients(average)
            self._outer.step()
        self.remember()
        if trained:
            for flat, values, local in zip(self.flat, self._global, trained, strict=True):
                flat.write(torch.lerp(values, local, self._alpha))

    def forget(self) -> None:
        """Forget what codecs have not sent of this rank's."""
        for codec in self._codecs:
            if isinstance(codec, Encoded):
                codec.forget()

    def drop(self) -> None:
        """Forget the sum that is under way."""
        self._exchanges, self._averages = [], None

    def state(self) -> dict[str, Any]:
        """Return copies of the outer state; a sum that is under way is awaited and kept for its time."""
        averages = self._finished() if self.under_way else None
        return {
            "global": [values.clone() for values in self._global],
            "kept": [copied(codec.kept()) for codec in self._codecs],
            "averages": None if averages is None else [average.clone() for average in averages],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.drop()
        self._global = self._like(state["global"])
        for flat, codec, kept in zip(self.flat, self._codecs, state["kept"], strict=True):
            codec.keep(copied(kept, flat.device))
        if state["averages"] is not None:
            self._averages = [
                average.to(flat.device, copy=True)
                for flat, average in zip(self.flat, state["averages"], strict=True)
            ]

    def _finished(self) -> list[torch.Tensor]:
        if self._averages is None:
            # In two turns: what can begin begins, in one order at all ranks, and then all is awaited.
            self.advance()
            self._averages = [exchange.finish() for exchange in self._exchanges]
        return self._averages

    def _like(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [(values.numel(), values.dtype) for values in saved]
        expected = [(flat.size, flat.dtype) for flat in self.flat]
        if found != expected:
            raise UsageError(
                f"the checkpoint's {self.name} has (values, type) {found}, the model's has {expected}:"
                " load a checkpoint of the same model and fragments"
            )
        return [values.to(flat.device, copy=True) for flat, values in zip(self.flat, saved, strict=True)]


def accumulator_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that values of `dtype` are summed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def check_finite(averages: Sequence[torch.Tensor], what: str, flat: Sequence[FlatParameters]) -> None:
    """Raise `NonFiniteUpdate` if an average is not finite.

    All ranks have the same average, so all raise. The message says whether this rank's values are the cause.
    """
    if all(bool(torch.isfinite(average).all()) for average in averages):
        return
    own = sum(int((~torch.isfinite(part.read())).sum()) for part in flat)
    cause = (
        f"{own} of this rank's parameters are not finite" if own else "this rank's own parameters are finite"
    )
    raise NonFiniteUpdate(
        f"{what} has NaN or infinite values ({cause}): training has diverged at some rank; lower the learning"
        " rate or clip gradients, and go on from a checkpoint"
    )
