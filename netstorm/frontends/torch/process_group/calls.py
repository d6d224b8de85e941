"""What the three kinds of calls of a process group have in common."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

import torch

from netstorm.errors import Closed, UsageError
from netstorm.frontends.torch.compiler import methods_are_never_compiled
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.process_group.exchanges import Exchanges
from netstorm.frontends.torch.process_group.member import Member
from netstorm.kvstore.options import loss_terms
from netstorm.protocol.messages import LossTerms

__all__ = ["Calls", "Tensor", "Tensors", "methods_raise_torch_errors", "only", "timeout_of"]

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[torch.Tensor]
Class = TypeVar("Class", bound=type)

_UNSET: Final = timedelta(0)


class Calls:
    """This process in the group, for those who make calls."""

    _member: Member
    _exchanges: Exchanges
    _is_closed: bool

    @property
    def loss_terms(self) -> LossTerms | None:
        """How the process's settings treat late gradients; None: all are waited for."""
        return loss_terms(self._member.runtime.settings)

    def _check_open(self) -> None:
        """Check that the group can be used.

        Raises:
            Closed: it has been destroyed.
        """
        if self._is_closed:
            raise Closed(f"process group {self._member.name!r} has been destroyed")

    def _root(self, options: Any) -> int:
        """Return the root that options of a call name."""
        return self._checked(int(options.rootRank))

    def _checked(self, rank: int) -> int:
        """Return a rank within the group.

        Raises:
            UsageError: there is no such rank.
        """
        size = self._member.size
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of a group of {size}: expected 0 to {size - 1}")
        return rank


def timeout_of(options: object) -> timedelta:
    """Return the time-out that options of a call bring; 0: none."""
    found = getattr(options, "timeout", _UNSET)
    return max(_UNSET, found)


def only(tensors: Tensors, name: str) -> Tensor:
    """Return the one tensor that PyTorch passes in a list.

    Raises:
        UsageError: there are none, or several.
    """
    if len(tensors) != 1:
        raise UsageError(f"{name}: {len(tensors)} tensors; the netstorm backend takes one at a time")
    return tensors[0]


def methods_raise_torch_errors(calls: Class) -> Class:
    """Decorate a class: its public methods raise errors that are also `DistBackendError`s, and are not
    compiled.
    """
    for name, member in list(vars(calls).items()):
        if not name.startswith("_") and inspect.isfunction(member):
            setattr(calls, name, raises_torch_errors(member))
    return methods_are_never_compiled(calls)
