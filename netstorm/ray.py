"""A job on [Ray](https://docs.ray.io): each rank is an actor, which runs a function. Needs `netstorm[ray]`.

    import ray
    from netstorm.ray import run

    ray.init(address="auto")
    losses = run(train, 0.1, nodes=4, options={"num_gpus": 1})

Ray chooses the hosts, spread over as many as there are. The scheduler runs beside rank 0. The job has a key
of its own, which Ray hands to the actors as an argument: as private as Ray's connections are (RAY_USE_TLS).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import ray

from netstorm.addresses import split_host_port
from netstorm.cli.launch.variables import KEY_FILE, Master, free_port, hold_key, variables_of_nodes
from netstorm.errors import UsageError
from netstorm.kvstore.process.runtime import leave_job
from netstorm.pslite.keys import JobKey
from netstorm.scheduler.process.scheduler_child import start_scheduler
from netstorm.settings import Settings, set_for_children

__all__ = ["run"]

R = TypeVar("R")

_END_S: Final = 60.0
"""For actors to end once their functions have: nodes forward for each other until all have left."""


def run(
    function: Callable[..., R],
    *arguments: object,
    nodes: int,
    options: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    placed_within_s: float = 300.0,
) -> list[R]:
    """Run a function at all ranks of a job, and return what each has returned, by rank.

    The function makes a `netstorm.Group`, or PyTorch's process group, as a script of `netstorm launch` does,
    and finds the same variables.

    Args:
        function: Ray must be able to serialise it, its arguments, and what it returns.
        arguments: the same for all ranks.
        nodes: number of ranks.
        options: of each actor, such as num_cpus and num_gpus; scheduling_strategy is SPREAD.
        variables: of all ranks besides their environment, such as NETSTORM_TOPOLOGY.
        placed_within_s: longest time until all actors run.

    Raises:
        UsageError: fewer than one node, or Ray does not place them in time.
        ray.exceptions.RayError: what a rank's function has raised first, or its actor has died. All others
            are ended.
    """
    if nodes < 1:
        raise UsageError(f"nodes={nodes}: expected at least 1 node")
    wanted = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(options or {})}
    key = JobKey.fresh().file_text()
    actors = [ray.remote(_Rank).options(**wanted).remote(key, dict(variables or {})) for _ in range(nodes)]
    ended = False
    try:
        try:
            hosts = ray.get([actor.host.remote() for actor in actors], timeout=placed_within_s)
        except ray.exceptions.GetTimeoutError:
            raise UsageError(
                f"nodes={nodes}: Ray has not placed them within {placed_within_s:g} s, each with {wanted}; "
                "`ray status` shows what the cluster has and what waits"
            ) from None
        address, torch_port = ray.get(actors[0].start_scheduler.remote(nodes))
        scheduler, port = split_host_port(address)
        master = Master(address=hosts[0], port=torch_port)
        of_ranks = variables_of_nodes(hosts, [None] * nodes, scheduler=scheduler, port=port, master=master)
        results = [
            actor.call.remote(own, function, arguments) for actor, own in zip(actors, of_ranks, strict=True)
        ]
        left: Sequence[Any] = results
        while left:
            done, left = ray.wait(left, num_returns=1)
            ray.get(done)  # raises what a rank has raised, as soon as it has
        found: list[R] = ray.get(results)
        ray.wait([actor.end.remote() for actor in actors], num_returns=nodes, timeout=_END_S)
        ended = True
        return found
    finally:
        for actor in () if ended else actors:
            ray.kill(actor)


class _Rank:
    """The actor of one rank."""

    def __init__(self, key: str, variables: dict[str, str]) -> None:
        set_for_children(**{**variables, KEY_FILE: hold_key(key)})

    def host(self) -> str:
        """Return the address at which Ray's other hosts reach this one."""
        here = ray.get_runtime_context().get_node_id()
        return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)

    def start_scheduler(self, nodes: int) -> tuple[str, int]:
        """Start the job's scheduler; return its address, and a port that is free for PyTorch's rank 0."""
        child = start_scheduler(Settings.from_environment(num_workers=nodes), self.host())
        atexit.register(child.wait)
        return child.address, free_port()

    def call(
        self, variables: dict[str, object], function: Callable[..., object], arguments: Sequence[object]
    ) -> object:
        """Run the function as this rank."""
        set_for_children(**variables, DMLC_NODE_HOST=self.host())
        result = function(*arguments)
        leave_job()  # not after a failure, of which others would hear first
        return result

    def end(self) -> None:
        """End this process, once no other rank needs it."""
        ray.actor.exit_actor()
