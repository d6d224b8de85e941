"""The one place that imports MXNet. It makes the stock 1.9 wheel importable on Python 3.10 to 3.12.

MXNet 1.9.1 (2022) is its last release. It uses `np.bool`, `np.int` and their like, which NumPy 1.24 removed,
was built for NumPy 1, and imports `distutils`, which Python 3.12 removed and setuptools brings back.

Before you import this module:

* Check `DMLC_ROLE`. If it is `server` or `scheduler`, `import mxnet` starts MXNet's own server or scheduler
  and does not return. A general node's role is `worker`.
* No warning is silenced: with `-W` you see the DeprecationWarnings that importing MXNet has long caused.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np

from netstorm.errors import UsageError

__all__ = ["load_mxnet", "mx"]

# NumPy 1.24 release notes, "Expired deprecations". They stay set: MXNet reads them whenever it is called.
_REMOVED_ALIASES: Final = {
    "bool": bool,
    "complex": complex,
    "float": float,
    "int": int,
    "object": object,
    "str": str,
}


_STARTERS: Final = "MXNET_CPU_PRIORITY_NTHREADS"
"""How many threads MXNet has that start our operations (`engine`), read once, when MXNet is imported. Each
holds the interpreter's lock meanwhile, so one does the work of MXNet's default, four: a batch of a small
network then takes .8 of the processor time."""


def load_mxnet() -> ModuleType:
    """Return the package `mxnet`, made importable first.

    Raises:
        UsageError: MXNet is not installed or not 1.9, NumPy is 2 or later, or `distutils` is missing;
            says what to install.
    """
    numpy_version = np.__version__
    if int(numpy_version.split(".", maxsplit=1)[0]) >= 2:
        raise UsageError(
            f"NumPy {numpy_version} is installed; MXNet 1.9 needs NumPy 1: pip install 'netstorm[mxnet]'"
        )
    # Not hasattr(): it asks NumPy's module __getattr__, which warns of the very names that we are about to
    # set.
    for name, builtin in _REMOVED_ALIASES.items():
        if name not in vars(np):
            setattr(np, name, builtin)
    _restore_distutils()
    os.environ.setdefault(_STARTERS, "1")  # noqa: TID251 -- MXNet's, not ours
    try:
        mxnet = importlib.import_module("mxnet")
    except ModuleNotFoundError as missing:
        if missing.name != "mxnet":
            raise
        raise UsageError(
            "MXNet is not installed: pip install 'netstorm[mxnet]' (MXNet runs on Python 3.10 to 3.12, "
            f"this is {sys.version_info.major}.{sys.version_info.minor})"
        ) from missing
    version = str(getattr(mxnet, "__version__", "of unknown version"))
    if not version.startswith("1.9."):
        raise UsageError(
            f"MXNet {version} is installed; NetStorm works with the 1.9 wheels: pip install 'netstorm[mxnet]'"
        )
    return mxnet


def _restore_distutils() -> None:
    """Let setuptools stand in for the `distutils` that Python 3.12 removed."""
    if importlib.util.find_spec("distutils") is not None:
        return
    try:
        importlib.import_module("setuptools")
    except ModuleNotFoundError as missing:
        raise UsageError(
            "MXNet imports distutils, which Python 3.12 removed; to bring it back: pip install setuptools"
        ) from missing


if TYPE_CHECKING:
    import mxnet as mx  # its types are those of typings/mxnet
else:
    mx = load_mxnet()
