"""Lets the names of PyTorch's own backends mean NetStorm, for scripts that stay unedited.

PyTorch turns each name that a script gives into a `Backend`: in `init_process_group`, in `new_group`, for the
dimensions of a `DeviceMesh`, and for each device of a form such as "cpu:gloo,cuda:nccl". That one place is
changed. PyTorch's own Gloo and NCCL stay within reach as `real_gloo` and `real_nccl`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from netstorm.errors import UsageError
from netstorm.frontends.torch.internals import as_accelerator, begin_counting_calls, set_timeout_of_options
from netstorm.frontends.torch.names import NAME
from netstorm.settings import Settings

__all__ = ["meaning", "own_name", "take_over_backends"]

_REAL: Final = "real_"
"""Prefix of the name under which a backend that was taken over is still PyTorch's own."""

_UNDEFINED: Final = "undefined"
"""PyTorch's name for a backend that it chooses by the device."""

_taken: set[str] = set()


def meaning(name: str, taken: frozenset[str], default: str) -> str:
    """Return the name that PyTorch gets to see.

    Args:
        name: a backend's name, or a list such as "cpu:gloo,cuda:nccl", in lower case.
        taken: the names that mean NetStorm.
        default: the backend that PyTorch itself would choose where a script chooses none.
    """
    if name == _UNDEFINED:
        return NAME if default in taken else name
    if ":" not in name:
        return NAME if name in taken else name
    parts = []
    for part in name.split(","):
        device, colon, backend = part.partition(":")
        parts.append(f"{device}{colon}{NAME if backend.strip() in taken else backend}")
    return ",".join(parts)


def own_name(name: str) -> str:
    """Return the name by which PyTorch's own backend can be had, whether its name is taken over or not."""
    return f"{_REAL}{name}" if name in _taken else name


def take_over_backends(names: str | None = None) -> None:
    """Let names of PyTorch's backends mean NetStorm in this process, from now on. Twice does no harm.

    Args:
        names: as `NETSTORM_TORCH_BACKENDS`; None: what it says.

    Raises:
        UsageError: the value is wrong, or this version of PyTorch does it in another way.
    """
    asked = Settings.from_environment({"NETSTORM_TORCH_BACKENDS": names} if names is not None else None)
    wanted = {name for name in asked.torch_backends.split(",") if name} - _taken
    if not wanted:
        return
    import torch.distributed as dist

    first = not _taken
    _taken.update(wanted)
    original = dist.Backend.__dict__["__new__"]
    try:
        _keep_the_real_ones(wanted)
        if first:
            dist.Backend.__new__ = staticmethod(_renaming(dist.Backend.__new__))  # type: ignore[method-assign]
        _check(wanted)
    except Exception as error:
        dist.Backend.__new__ = original  # type: ignore[method-assign]
        _taken.difference_update(wanted)
        raise UsageError(_refusal(wanted, error)) from error


def _renaming(original: Callable[..., str]) -> Callable[..., str]:
    """Return PyTorch's way from a name to a backend, with the names that are taken over."""

    def new(cls: type, name: object) -> str:
        value = original(cls, name)
        return meaning(value, frozenset(_taken), _default() if value == _UNDEFINED else "")

    return new


def _default() -> str:
    """Return the backend that PyTorch would choose on this machine."""
    import torch.distributed as dist

    return dist.Backend.default_device_backend_map.get(as_accelerator(), "")


def _check(wanted: set[str]) -> None:
    """Check that PyTorch maps the names to NetStorm, in all forms."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    for name in wanted:
        forms = (name, name.upper(), f"cpu:{name}", f"cpu:{name},cuda:{name}")
        for found in (BackendConfig(Backend(form)).get_device_backend_map() for form in forms):
            if set(found.values()) != {NAME}:
                raise LookupError(f"{name!r} means {found} after the change")


def _keep_the_real_ones(wanted: set[str]) -> None:
    import torch.distributed as dist

    creators: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
        "gloo": (_real_gloo, ["cpu", "cuda"]),
        "nccl": (_real_nccl, ["cuda"]),
    }
    for name in wanted & creators.keys():
        creator, devices = creators[name]
        dist.Backend.register_backend(f"{_REAL}{name}", creator, extended_api=True, devices=devices)


def _real_gloo(options: Any, _backend_options: Any) -> Any:
    """Create what `_new_process_group_helper` creates for "gloo"."""
    from torch.distributed import ProcessGroupGloo

    made = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    made.options.global_ranks_in_group = options.global_ranks_in_group
    made.options.group_name = options.group_id
    begin_counting_calls(made)
    return made


def _real_nccl(options: Any, backend_options: Any) -> Any:
    """Create what `_new_process_group_helper` creates for "nccl"."""
    from torch.distributed import ProcessGroupNCCL

    chosen = backend_options if backend_options is not None else ProcessGroupNCCL.Options()
    set_timeout_of_options(chosen, options.timeout)
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    made = ProcessGroupNCCL(options.store, options.group_rank, options.group_size, chosen)
    begin_counting_calls(made)
    return made


def _refusal(wanted: set[str], error: Exception) -> str:
    import torch

    names = ", ".join(sorted(wanted))
    return (
        f"NETSTORM_TORCH_BACKENDS={names}: PyTorch {torch.__version__} turns the names of backends into "
        f"backends in another way than expected ({type(error).__name__}: {error}); give the script's "
        'init_process_group the backend "netstorm" instead, or install PyTorch 2.13'
    )
