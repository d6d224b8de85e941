"""Imports MXNet, which needs names that NumPy 1.24 removed; NetStorm's frontend brings them back."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import numpy as np

from digits.errors import ExampleError
from digits.options import Options

__all__ = ["check_optimizer", "create_store", "mx"]


def _mxnet() -> Any:
    try:
        compat = importlib.import_module("netstorm.frontends.mxnet.compat")
    except ModuleNotFoundError as missing:
        # Without NetStorm the examples still run with MXNet's own stores, but a broken one must show.
        if missing.name is None or not missing.name.startswith("netstorm"):
            raise
    else:
        return compat.mx
    for name in ("bool", "object", "int", "float", "complex", "str"):
        if name not in vars(np):
            setattr(np, name, getattr(builtins, name))
    return importlib.import_module("mxnet")


mx = _mxnet()


def create_store(name: str) -> Any:
    """Return `mx.kv.create(name)`, after making NetStorm's stores known to it if `name` is one of them.

    Raises:
        ExampleError: NetStorm is not installed (MXNet would take `netstorm` for a local store), or the
            environment does not describe a job, or the job does not come together.
    """
    if "netstorm" in name:
        try:
            import netstorm.frontends.mxnet  # noqa: F401, PLC0415 - registers dist_sync_netstorm
        except ModuleNotFoundError as missing:
            if missing.name is None or not missing.name.startswith("netstorm"):
                raise
            raise ExampleError(
                f"--kv-store {name} needs NetStorm: pip install 'netstorm[mxnet]'; local does without"
            ) from missing
    try:
        return mx.kv.create(name)
    except (ValueError, OSError) as error:  # NetStorm's UsageError and Unavailable
        raise ExampleError(f"--kv-store {name}: {error}") from error
    except mx.MXNetError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ExampleError(
            f"--kv-store {name}: {reason}; MXNet's own distributed stores need a scheduler, servers and the "
            "DMLC_* variables, as its tools/launch.py sets them"
        ) from error


def check_optimizer(options: Options) -> None:
    """Make the optimizer once on trial.

    Raises:
        ExampleError: MXNet has none of that name, or it takes other parameters.
    """
    known = sorted(set(mx.optimizer.Optimizer.opt_registry) - {"test"})
    if options.optimizer not in known:
        raise ExampleError(f"--optimizer {options.optimizer}: MXNet has {', '.join(known)}")
    try:
        mx.optimizer.create(options.optimizer, **options.optimizer_params)
    except TypeError as error:
        raise ExampleError(
            f"--optimizer {options.optimizer} with {options.optimizer_params}: {error}"
        ) from error
