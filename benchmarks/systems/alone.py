"""A worker without any store: what it needs is the base line of the memory that stores need."""

from __future__ import annotations

from systems.base import Case, Launch, Node, Process, environment, worker_command

__all__ = ["alone", "alone_launch"]


def alone(name: str, case: Case) -> Node:
    """Return a node that holds the arrays of `case`; `name` is without-mxnet or without-torch."""
    if name == "without-torch":
        from systems.gloo import Tensors  # noqa: PLC0415 - one process needs one framework

        return Tensors(case)
    from systems.kvstore_node import NDArrays  # noqa: PLC0415

    return NDArrays(case)


def alone_launch(framework: str, case: Case) -> Launch:
    """Return the one process of such a node."""
    name = f"without-{framework}"
    return Launch(workers=[Process(name=name, command=worker_command(name, case), environment=environment())])
