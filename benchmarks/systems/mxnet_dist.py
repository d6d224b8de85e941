"""MXNet's own parameter server, `dist_sync` of the published package: scheduler, servers, workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from systems.base import BENCHMARKS, Case, Launch, Node, Process, environment, worker_command

__all__ = ["MXNetDist"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MXNetDist:
    """`servers` None is as many servers as workers, one beside each."""

    name: str
    servers: int | None
    hub: int = 0
    """Beside which rank a single server runs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    framework: str = "mxnet"

    @property
    def settings(self) -> Mapping[str, str]:
        """What it is run with."""
        return {
            "kvstore": "dist_sync",
            "DMLC_NUM_SERVER": "as many as workers" if self.servers is None else str(self.servers),
            "MXNET_KVSTORE_BIGARRAY_BOUND": "1000000 (default): larger arrays are spread over all servers",
            "DMLC_PS_VAN_TYPE": "zmq (default)",
            **({"server": f"beside rank {self.hub}"} if self.servers == 1 else {}),
            **self.variables,
        }

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        servers = case.nodes if self.servers is None else self.servers
        job = {
            "DMLC_PS_ROOT_URI": case.host(0),
            "DMLC_PS_ROOT_PORT": case.port(),
            "DMLC_NUM_WORKER": case.nodes,
            "DMLC_NUM_SERVER": servers,
            **self.variables,
        }
        role = [sys.executable, str(BENCHMARKS / "systems" / "mxnet_role.py")]

        def process(what: str, kind: str, rank: int, command: list[str]) -> Process:
            variables = environment(DMLC_ROLE=kind, DMLC_NODE_HOST=case.host(rank), **job)
            return Process(name=f"{self.name} {what}", command=command, environment=variables, rank=rank)

        worker = worker_command("mxnet-1-server", case)
        return Launch(
            helpers=[
                process("scheduler", "scheduler", 0, role),
                *(
                    process(f"server {number}", "server", self.hub if servers == 1 else number, role)
                    for number in range(servers)
                ),
            ],
            workers=[process(f"worker {rank}", "worker", rank, worker) for rank in range(case.nodes)],
        )

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        servers = case.nodes if self.servers is None else self.servers
        return (case.nodes + servers) * 150_000_000 + case.bytes * (4 * case.nodes + 3)

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        from systems.kvstore_node import KVStoreNode  # noqa: PLC0415 - the driver has no use for MXNet

        return KVStoreNode(case, "dist_sync")
