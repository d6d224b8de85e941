"""What ranks tell each other beside tensors: plain values, as MessagePack in tensors, decoded by a schema.

PyTorch's object collectives pickle, so a member that gives a crafted object to one runs code in all others.
`pyproject.toml` and `tests/unit/test_nothing_unpickles.py` keep them out of this package.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.torch.errors import as_torch_error
from netstorm.frontends.torch.internals import device_kinds

__all__ = ["PlainValue", "exchange_values", "tensor_device"]

Kind = TypeVar("Kind")

PlainValue: TypeAlias = bool | int | float | str | list[str | list[str]] | None
"""What a setting may be."""

_MOST_BYTES: Final = 2**20
"""Of one rank's values. Each rank receives as much as the largest of all ranks takes, so no member may make
others reserve more than this for each.
"""


def exchange_values(
    kind: type[Kind], mine: object, what: str, group: dist.ProcessGroup | None = None
) -> list[Kind]:
    """Return what each rank of a group gives, in order of ranks; blocks.

    Args:
        kind: what msgspec decodes.
        mine: of this rank.
        what: it is, for errors.
        group: None: the default group.

    Raises:
        UsageError: this rank's values are too large, or are not of that kind.
        ProtocolViolation: another's are; it is named.
    """
    content = _encoded(mine, what)
    device = tensor_device(group)
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    lengths = [int(each) for each in _all_gather(length, group)]
    for rank, count in enumerate(lengths):
        if not 0 < count <= _MOST_BYTES:
            raise as_torch_error(
                ProtocolViolation(f"{what}: rank {rank} announces {count} bytes; expected 1 to {_MOST_BYTES}")
            )
    padded = content + bytes(max(lengths) - len(content))
    contents = _all_gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device), group)
    decoder = msgspec.msgpack.Decoder(kind)
    values = []
    for rank, (tensor, count) in enumerate(zip(contents, lengths, strict=True)):
        try:
            values.append(decoder.decode(tensor[:count].cpu().numpy().tobytes()))
        except msgspec.MsgspecError as error:
            raise as_torch_error(
                ProtocolViolation(f"{what}: what rank {rank} has sent does not decode: {error}")
            ) from None
    return values


def tensor_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where a group's collectives take tensors: the CPU, if it can."""
    chosen: Any = dist.group.WORLD if group is None else group
    kinds = device_kinds(chosen)
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _encoded(mine: object, what: str) -> bytes:
    def plain(value: object) -> object:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{value!r} of type {type(value).__name__}")

    try:
        content = msgspec.msgpack.encode(mine, enc_hook=plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{what}: {error}: expected numbers and texts, which all ranks compare") from None
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{what}: {len(content)} bytes; expected {_MOST_BYTES} at most")
    return content


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return gathered
