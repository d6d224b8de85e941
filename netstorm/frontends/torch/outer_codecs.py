"""How outer gradients travel: a codec averages one vector over all ranks.

Over a NetStorm group these are the codecs of `netstorm.compression`, which make one call of all their rounds.
Over other groups, "float32", "bfloat16" and "int8" are made of the collectives that every backend has.

A codec is a generator of collectives. It begins one, yields it, and goes on when that one is done; what it
returns is the average. So a codec reads like blocking code, and whoever drives it (`OuterAverage`) decides
how many inner steps each collective may take. A new codec is a class with `OuterCodec`'s members, given to
`DiLoCo` as `codec=ThatClass`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import torch
from torch.nn import functional

from netstorm.compression import registry
from netstorm.errors import UsageError
from netstorm.frontends.torch.gradient_codecs import Descriptions, EncodedAverages
from netstorm.frontends.torch.member import CallWork
from netstorm.frontends.torch.parameters import FlatParameters
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.frontends.torch.ranks import Ranks, Waitable
from netstorm.kvstore.rounds.bounded_loss import MOST_MISSED
from netstorm.protocol.messages import LossTerms
from netstorm.training.codec_states import Parameter

__all__ = [
    "BLOCK",
    "CODECS",
    "CodecFactory",
    "CodecOf",
    "Encoded",
    "Kept",
    "OuterAverage",
    "OuterBFloat16",
    "OuterCodec",
    "OuterFloat32",
    "OuterInt8",
    "OuterQuorum",
    "codecs_of_vectors",
    "copied",
    "whole_number_form",
]


# Outer gradients in one byte a value, over process groups other than NetStorm's.
#
# Each block of values has one scale, which all ranks share: the largest magnitude of any rank. Each rank
# sends whole numbers from -levels to levels, with `levels` so small that the sum over all ranks still fits.
# Whole numbers add up without rounding, so every tree gives the same bits. What a rank rounds off it adds
# to its next update (error feedback: Karimireddy et al., arXiv 1901.09847).

BLOCK: Final = 256
"""Values that share a scale: scales are 4 bytes a block, 1.6 % of the payload."""

_MOST_RANKS_IN_INT8: Final = 16
"""With more, a rank would have fewer than 7 levels on each side of zero."""
_MOST_RANKS_IN_INT16: Final = 4096
"""As above, of int16."""


class OuterInt8:
    """Block-wise whole numbers with error feedback: int8 up to 16 ranks, int16 or int32 beyond.

    An average takes two collectives: the scales (MAX), then the numbers (SUM).
    """

    name: ClassVar[str] = "int8"
    collectives: ClassVar[int] = 2

    def __init__(self) -> None:
        self._residual: torch.Tensor | None = None

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Agree on scales, sum whole numbers, and keep what was rounded off."""
        if self._residual is not None:
            update.add_(self._residual)
        blocks = functional.pad(update, (0, -update.numel() % BLOCK)).view(-1, BLOCK)
        # Backends differ in the maximum of NaN and a number; all agree on infinity.
        scales = blocks.abs().amax(dim=1, keepdim=True).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        yield ranks.begin_max(scales)
        dtype, levels = whole_number_form(ranks.size, short_integers=ranks.short_integers)
        # A block of zeros has scale 0. The average of one with an infinite scale is NaN, whatever is sent.
        numbers = (blocks / scales).mul_(levels).round_().nan_to_num_(nan=0.0)
        sums = numbers.to(dtype)
        rounded_off = blocks.sub_(numbers.div_(levels).mul_(scales)).nan_to_num_(
            nan=0.0, posinf=0.0, neginf=0.0
        )
        self._residual = rounded_off.view(-1)[: update.numel()]
        yield ranks.begin_sum(sums)
        return sums.to(update.dtype).div_(levels * ranks.size).mul_(scales).view(-1)[: update.numel()]

    def kept(self) -> torch.Tensor | None:
        """Return the residual."""
        return self._residual

    def keep(self, kept: torch.Tensor | dict[str, Any] | None) -> None:
        """Set the residual.

        Raises:
            UsageError: it is of a NetStorm group.
        """
        if isinstance(kept, dict):
            raise UsageError("the checkpoint's int8 is that of a NetStorm group: go on over one")
        self._residual = kept


def whole_number_form(ranks: int, *, short_integers: bool) -> tuple[torch.dtype, int]:
    """Return the type of the numbers, and the largest one, so that a sum over `ranks` cannot overflow.

    Args:
        ranks: how many are added.
        short_integers: whether the backend sums int16; if it does not, int32 takes its place.
    """
    if ranks <= _MOST_RANKS_IN_INT8:
        return torch.int8, torch.iinfo(torch.int8).max // ranks
    levels = torch.iinfo(torch.int16).max // ranks
    if short_integers and ranks <= _MOST_RANKS_IN_INT16:
        return torch.int16, levels
    return torch.int32, max(levels, torch.iinfo(torch.int8).max)


Kept: TypeAlias = torch.Tensor | dict[str, Any] | None
"""What a codec keeps from one average to the next; a dictionary has tensors and such dictionaries."""


class OuterCodec(Protocol):
    """Averages one vector, again and again; it may keep something (a residual) from one time to the next."""

    @property
    def name(self) -> str:
        """What ranks compare: all must use the same codec."""

    @property
    def collectives(self) -> int:
        """How many collectives an average takes, one after the other."""

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Yield each collective after it has begun, and return the average, the same bits at all ranks.

        Args:
            update: this rank's values, float32 or float64; the codec may write to it.
            ranks: whom to average over.

        If any rank's values are NaN or infinite, so must be some of the average's.
        """

    def kept(self) -> Kept:
        """Return what is kept for the next average."""

    def keep(self, kept: Kept) -> None:
        """Set what is kept, from a checkpoint."""


CodecFactory: TypeAlias = Callable[[], OuterCodec]
"""Makes a codec for one vector."""

CodecOf: TypeAlias = Callable[[FlatParameters, Sequence[str]], OuterCodec]
"""Makes the codec for the vector of some parameters, which have names."""


class _KeepsNothing:
    def kept(self) -> None:
        """Keep nothing."""

    def keep(self, kept: Kept) -> None:
        """Keep nothing."""


class OuterFloat32(_KeepsNothing):
    """Values as they are: float32, or float64 for parameters in float64."""

    name: ClassVar[str] = "float32"
    collectives: ClassVar[int] = 1

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Sum in place."""
        yield ranks.begin_sum(update)
        return update.div_(ranks.size)


class OuterBFloat16(_KeepsNothing):
    """Half the bytes: values and sums have 8 significant bits. What is rounded off is lost."""

    name: ClassVar[str] = "bfloat16"
    collectives: ClassVar[int] = 1

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Sum in bfloat16; divide in the type of `update`."""
        rounded = update.to(torch.bfloat16)
        yield ranks.begin_sum(rounded)
        return rounded.to(update.dtype).div_(ranks.size)


_LEAST_GRACE_S: Final = 0.001
"""Sums that may end at once would still have to say that they may: by a deadline that is not 0."""


class OuterQuorum:
    """float32 over a NetStorm group, in sums that end without ranks that come too late. Their values count in
    a later sum (`kvstore.rounds.bounded_loss`), so sums are divided by all ranks; in an elastic job, by those
    that are in it.

    Attributes:
        recent: the ranks in each of the last sums. Nobody can be late for all of them, so who is in none is
            not in the job any more.
    """

    collectives: ClassVar[int] = 1

    def __init__(self, group: NetStormProcessGroup, size: int, quorum: int, grace_s: float) -> None:
        """Begin without values that are late.

        Args:
            group: whose ranks are averaged over.
            size: of the vector, in bytes.
            quorum: so many ranks are waited for, however long it takes; or all, if an elastic job has fewer.
            grace_s: and all others so long, from the first one's values on.
        """
        self.name: Final = f"float32 quorum={quorum} grace={grace_s:g}"
        self.recent: Final[deque[frozenset[int]]] = deque(maxlen=MOST_MISSED + 1)
        self._quorum: Final = quorum
        self._grace_s: Final = max(grace_s, _LEAST_GRACE_S)
        self._live: Final = group.member.runtime.node.live
        self._group: Final = group
        # A sequence of its own: how often in a row a rank may be late is counted for each.
        self._calls: Final = group.member.more_calls("quorum")
        self._calls.prepare(size)
        self._uncounted: torch.Tensor | None = None
        self._work: CallWork | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the next sum has ended without this rank. If it was late for the last one, it is behind
        once others have begun the next: it had better be in that one.
        """
        work = self._work
        was_late = (
            work is not None and work.is_completed() and self._group.rank() not in (work.contributors or ())
        )
        return self._group.member.is_behind(self._calls, begun=was_late)

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Sum what was late before along with it. A rank that has just joined has nothing that is late."""
        live = self._live
        # There are none while only newcomers are left, and it is open which of them go on.
        size = max(1, len(live.contributors)) if live.is_elastic else ranks.size
        mine = update.div_(size).cpu()
        late = self._uncounted if live.contributes else None
        self._uncounted = mine.clone() if late is None else late.add_(mine)
        # All ranks count alike here, so what is missing is a share of the ranks; half of one is for rounding.
        # Ranks hear at different times that others have come or left; what a sum's root has heard counts.
        bound = (size - min(self._quorum, size) + 0.5) / size
        terms = LossTerms(bound=bound, deadline_s=self._grace_s)
        work = self._work = self._group.allreduce_with_loss(
            self._uncounted, update, terms, 0, calls=self._calls, said=self.name
        )
        yield work
        self.recent.append(work.contributors or frozenset())
        return update

    def kept(self) -> torch.Tensor | None:
        """Return what has not been counted."""
        return self._uncounted

    def keep(self, kept: torch.Tensor | dict[str, Any] | None) -> None:
        """Set what has not been counted.

        Raises:
            UsageError: it is another codec's.
        """
        if isinstance(kept, dict):
            raise UsageError("the checkpoint was saved without a quorum: go on without one")
        self._uncounted = None if kept is None else kept.cpu()


CODECS: Final[dict[str, CodecFactory]] = {
    codec.name: codec for codec in (OuterFloat32, OuterBFloat16, OuterInt8)
}
"""Those of any process group, by the name that a script says."""

_EVERYWHERE: Final = {"none": "float32", "bf16": "bfloat16"}
"""Names that `netstorm.compression` gives to codecs which any group has."""


class Encoded:
    """A codec of `netstorm.compression`, over a NetStorm group: one call makes all its rounds."""

    collectives: ClassVar[int] = 1

    def __init__(self, averages: EncodedAverages, name: str, parameters: Sequence[Parameter]) -> None:
        """Begin without anything that is kept.

        Args:
            averages: makes those of this vector alone.
            name: what ranks compare.
            parameters: whose values the vector has.
        """
        self.name: Final = name
        self._averages: Final = averages
        self._parameters: Final = parameters

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Average in place; values of float64 are rounded to float32 first."""
        narrow = update.float()
        yield self._averages.begin(narrow, self._parameters)
        return update.copy_(narrow)

    def kept(self) -> Kept:
        """Return what the codec keeps of each parameter."""
        return self._averages.kept()

    def forget(self) -> None:
        """Forget what this rank has not sent: it has just joined, and what it sent counted in no average."""
        self._averages.forget_elements()

    def keep(self, kept: Kept) -> None:
        """Set what is kept; the residual of a whole vector is that of "int8" over another group."""
        if isinstance(kept, torch.Tensor):
            parts = torch.split(kept.float(), [parameter.elements for parameter in self._parameters])
            names = [parameter.name for parameter in self._parameters]
            self._averages.keep_residual(dict(zip(names, parts, strict=True)))
        elif kept is not None:
            self._averages.keep(kept)


def codecs_of_vectors(codec: Descriptions | CodecFactory, group: object) -> CodecOf:
    """Return what makes the codec of each vector.

    Args:
        codec: a name; a mapping with `type` and parameters; one of these for each pattern of parameters'
            names; or what makes a codec, such as a class.
        group: over which vectors are averaged.

    Raises:
        UsageError: there is no such codec, a parameter of it is wrong, or this group does not have it.
    """
    if not isinstance(codec, (str, Mapping)):
        return lambda _flat, _names: codec()
    plain = _EVERYWHERE.get(codec, codec) if isinstance(codec, str) else ""
    of_netstorm = isinstance(group, NetStormProcessGroup)
    if plain in CODECS and not (of_netstorm and plain in registry.CODECS):
        factory = CODECS[plain]
        return lambda _flat, _names: factory()
    if isinstance(codec, str) and codec not in registry.CODECS:
        known = dict.fromkeys([*CODECS, *registry.CODECS])
        raise UsageError(
            f"codec={codec!r}: there are {', '.join(map(repr, known))}; your own is given as its class"
        )
    rules = registry.rules_of(codec)
    if not isinstance(group, NetStormProcessGroup):
        raise UsageError(
            f"codec={codec!r} over a group that is none of NetStorm's: such groups have "
            f"{', '.join(map(repr, CODECS))}, or your own codec, given as its class; "
            "torch.distributed.new_group(backend='netstorm') makes one for all"
        )
    member, name = group.member, codec if isinstance(codec, str) else rules.fingerprint

    def make(flat: FlatParameters, names: Sequence[str]) -> OuterCodec:
        parameters = [Parameter(*each) for each in zip(names, flat.shapes, strict=True)]
        averages = EncodedAverages(member, codec, "outer gradients")
        for parameter in parameters:
            averages.check(parameter, torch.float32)
        return Encoded(averages, name, parameters)

    return make


def copied(kept: Kept, device: torch.device | None = None) -> Kept:
    """Return a copy of what a codec keeps; a tensor on `device`, or where it is."""
    if isinstance(kept, torch.Tensor):
        return kept.to(device or kept.device, copy=True)
    return copy.deepcopy(kept)


class OuterAverage:
    """One average under way.

    `begin`, `advance` and `finish` must be called in the same order at all ranks, because they begin
    collectives.
    """

    def __init__(self, codec: OuterCodec, update: torch.Tensor, ranks: Ranks) -> None:
        self._collectives = codec.average(update, ranks)
        self._left = codec.collectives - 1
        self._average: torch.Tensor | None = None
        self._work = next(self._collectives)

    def advance(self) -> None:
        """Begin the next collective if there is one, waiting for the one before; never wait for the last."""
        if self._left:
            self._left -= 1
            self._go_on()

    def finish(self) -> torch.Tensor:
        """Wait for the average and return it; again and again the same."""
        while self._average is None:
            self._go_on()
        return self._average

    def _go_on(self) -> None:
        self._work.wait()
        try:
            self._work = next(self._collectives)
        except StopIteration as end:
            self._average = end.value
