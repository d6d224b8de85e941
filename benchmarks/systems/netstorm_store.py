"""NetStorm as MXNet's users have it: `dist_sync_netstorm`, general nodes and a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from netstorm.settings import declarations
from systems.base import BENCHMARKS, Case, Launch, Node, Process, environment, free_port, worker_command

__all__ = ["NetStormStore"]

_OF_THE_JOB = ("DMLC_", "NETSTORM_RANK", "NETSTORM_JOB", "NETSTORM_PORT")


def _users_settings() -> dict[str, str]:
    """Return the settings that the user's environment has, but for those that every job has its own of."""
    known = (declaration.variable for declaration in declarations().values())
    given = (name for name in known if name in os.environ and not name.startswith(_OF_THE_JOB))
    return {name: os.environ[name] for name in given}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetStormStore:
    """NetStorm's store. Settings are those of the environment: `CHUNK_SIZE=16384 benchmarks/loopback.py`."""

    name: str = "netstorm"
    framework: str = "mxnet"

    @property
    def settings(self) -> Mapping[str, str]:
        """What it is run with."""
        return {
            "kvstore": "dist_sync_netstorm",
            **(_users_settings() or {"variables": "all at their defaults"}),
        }

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        job = {
            **_users_settings(),
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": free_port(),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": case.nodes,
        }
        scheduler = Process(
            name="netstorm scheduler",
            command=[sys.executable, str(BENCHMARKS / "systems" / "netstorm_role.py")],
            environment=environment(DMLC_ROLE="scheduler", **job),
        )
        workers = [
            Process(
                name=f"netstorm node {rank}",
                command=worker_command(self.name, case),
                environment=environment(DMLC_ROLE="worker", NETSTORM_RANK=rank, **job),
            )
            for rank in range(case.nodes)
        ]
        return Launch(helpers=[scheduler], workers=workers)

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return (case.nodes + 1) * 150_000_000 + case.nodes * 5 * case.bytes

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        import netstorm.frontends.mxnet  # noqa: F401, PLC0415 - registers dist_sync_netstorm
        from systems.kvstore_node import KVStoreNode  # noqa: PLC0415 - the driver has no use for MXNet

        return KVStoreNode(case, "dist_sync_netstorm")
