"""What PyTorch calls at the end of `import torch`: it makes the backend `netstorm` known, and nothing else.

In a process that `netstorm launch` has started for a rank, `init_process_group` is watched, too: it joins the
job first, since PyTorch's own rendezvous waits long, and blindly, for ranks that have died; and it says so if
the group that it makes is not NetStorm's.

Every program that imports PyTorch pays for this, so no other module of NetStorm is imported until a process
group is created. https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from typing import Any, Final

from netstorm.frontends.torch.names import NAME

__all__ = ["autoload"]

_logger: Final = logging.getLogger(__name__)


def autoload() -> None:
    """Register the backend with PyTorch, and take over other backends' names if that is asked for.

    Twice does no harm.

    Raises:
        UsageError: `NETSTORM_TORCH_BACKENDS` has a wrong value, or this PyTorch lets no names be taken over.
    """
    import torch.distributed as dist

    if not dist.is_available():  # PyTorch was built without it
        return
    try:
        if NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # "import torch" must work for programs that do not want NetStorm
        _logger.warning("netstorm: cannot be registered as a backend of torch.distributed", exc_info=True)
    environment = os.environ  # noqa: TID251 -- as below
    if environment.get("DMLC_ROLE") == "worker" and environment.get("NETSTORM_RESTART"):
        _watch_init_process_group()
    if os.environ.get("DMLC_PS_ROOT_URI"):  # noqa: TID251 -- as below; a launcher of NetStorm has set it
        from netstorm.frontends.torch.store import limit_the_store_to_its_address

        limit_the_store_to_its_address()
    # netstorm.settings would add 20 ms to each "import torch", so it is asked only if the answer matters.
    if os.environ.get("NETSTORM_TORCH_BACKENDS"):  # noqa: TID251
        from netstorm.frontends.torch.take_over import take_over_backends

        take_over_backends()


def _watch_init_process_group() -> None:
    """Let PyTorch's `init_process_group` join the job first, or say that it does not."""
    import torch.distributed as dist

    original = dist.init_process_group
    if hasattr(original, "_netstorm"):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *arguments: Any, **named: Any) -> None:
        meant = str(dist.Backend(backend or "undefined"))
        if NAME in meant:
            startup = importlib.import_module("netstorm.frontends.torch.startup")
            startup.join_before_rendezvous(meant, *arguments, **named)
        elif not dist.is_initialized() and meant != "fake":
            _say_not_netstorm(backend)
        original(backend, *arguments, **named)

    init_process_group._netstorm = True  # type: ignore[attr-defined]  # noqa: SLF001 -- our own mark
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        if getattr(module, "init_process_group", None) is original:
            setattr(module, "init_process_group", init_process_group)  # noqa: B010 -- mypy knows no such attribute


def _say_not_netstorm(backend: str | None) -> None:
    rank = os.environ.get("RANK")  # noqa: TID251 -- as above
    named = "PyTorch's default backend" if backend is None else f"PyTorch's own backend {backend!r}"
    sys.stderr.write(
        f"netstorm: rank {rank} makes a default group of {named}, so nothing of it goes over NetStorm: write "
        f'init_process_group("{NAME}"), or start the script with python -m netstorm.run\n'
    )


def _create(options: Any, backend_options: object) -> Any:
    """Create a process group; PyTorch's plugin interface.

    From then on, processes that this one starts have PyTorch's own backends.

    Args:
        options: PyTorch's `_DistributedBackendOptions`.
        backend_options: what the script gave as `pg_options`.
    """
    from netstorm.settings import set_for_children

    startup = importlib.import_module("netstorm.frontends.torch.startup")
    made = startup.create_process_group(options, backend_options)
    # What a rank starts is no rank. PyTorch's asynchronous checkpoints use Gloo in processes of their own.
    set_for_children(NETSTORM_TORCH_BACKENDS=None, DMLC_ROLE=None)
    return made
