"""NetStorm as it is in some folder: an older version beside a newer one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from netstorm.errors import UsageError
from systems.base import Case, Launch, Node, Process, environment
from systems.netstorm_store import NetStormStore

__all__ = ["Checkout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """The processes are those of `NetStormStore`, by these benchmarks; the package they import is another."""

    name: str
    folder: Path
    """A checkout of NetStorm."""
    variables: Mapping[str, str] = field(default_factory=dict)
    framework: str = "mxnet"

    @property
    def settings(self) -> Mapping[str, str]:
        """What it is, and what it is run with."""
        return {"folder": str(self.folder), "commit": self.commit(), **self._store().settings}

    def check(self) -> None:
        """Make sure that processes of this version import its package.

        Raises:
            UsageError: they import another one, or none.
        """
        found = subprocess.run(
            [sys.executable, "-c", "import netstorm; print(netstorm.__file__)"],
            env=environment(PYTHONPATH=self.folder.resolve()),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        package = Path(found.stdout.strip() or "none")
        if self.folder.resolve() not in package.parents:
            raise UsageError(
                f"{self.folder} is no checkout of NetStorm: what is imported is {package}\n{found.stderr}"
            )

    def commit(self) -> str:
        """Return what is checked out, as git says it; empty if it does not."""
        found = subprocess.run(
            ["git", "-C", str(self.folder), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
        return found.stdout.strip()

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        launch = self._store().launch(case)
        return Launch(
            helpers=[self._here(process) for process in launch.helpers],
            workers=[self._here(process) for process in launch.workers],
        )

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return self._store().memory(case)

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        return self._store().join(case)

    def _here(self, process: Process) -> Process:
        path = {"PYTHONPATH": str(self.folder.resolve())}
        return replace(process, environment={**process.environment, **path})

    def _store(self) -> NetStormStore:
        return NetStormStore(name=self.name, variables=self.variables)
