"""NetStorm as MXNet's users have it: `dist_sync_netstorm`, general nodes and a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from netstorm.settings import declarations
from systems.base import BENCHMARKS, Case, Launch, Node, Process, environment, worker_command

__all__ = ["NetStormStore", "users_settings"]

_OF_THE_JOB = ("DMLC_", "NETSTORM_RANK", "NETSTORM_JOB", "NETSTORM_PORT")


def users_settings() -> dict[str, str]:
    """Return the settings that the user's environment has, but for those that every job has its own of."""
    known = (declaration.variable for declaration in declarations().values())
    given = (name for name in known if name in os.environ and not name.startswith(_OF_THE_JOB))
    return {name: os.environ[name] for name in given}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetStormStore:
    """NetStorm's store. Settings are those of the environment: `CHUNK_SIZE=16384 benchmarks/loopback.py`."""

    name: str = "netstorm"
    variables: Mapping[str, str] = field(default_factory=dict)
    """Settings of this job, which win over those of the environment."""
    framework: str = "mxnet"

    @property
    def settings(self) -> Mapping[str, str]:
        """What it is run with."""
        return {
            "kvstore": "dist_sync_netstorm",
            **({**users_settings(), **self.variables} or {"variables": "all at their defaults"}),
        }

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        job = {
            **users_settings(),
            **self.variables,
            "DMLC_PS_ROOT_URI": case.host(0),
            "DMLC_PS_ROOT_PORT": case.port(),
            "DMLC_NUM_WORKER": case.nodes,
        }
        if not job.get("NETSTORM_KEY_FILE"):  # plain, as its peers are, unless =auto asks for encryption
            job.setdefault("NETSTORM_SECURITY", "off")
        if job.get("NETSTORM_SECURITY") == "auto":
            from netstorm.cli.launch.variables import hold_key  # noqa: PLC0415 - older versions have no keys
            from netstorm.pslite.keys import JobKey  # noqa: PLC0415 - older versions have no keys

            job.setdefault("NETSTORM_KEY_FILE", hold_key(JobKey.fresh().file_text()))
        scheduler = Process(
            name=f"{self.name} scheduler",
            command=[sys.executable, str(BENCHMARKS / "systems" / "netstorm_role.py")],
            environment=environment(DMLC_ROLE="scheduler", DMLC_NODE_HOST=case.host(0), **job),
        )
        workers = [
            Process(
                name=f"{self.name} node {rank}",
                command=worker_command("netstorm", case),
                environment=environment(
                    DMLC_ROLE="worker", DMLC_NODE_HOST=case.host(rank), NETSTORM_RANK=rank, **job
                ),
                rank=rank,
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
