"""Runs tests of the PyTorch wheel on real ranks, over NetStorm.

    python -m tests.integration.torch.wheel.program SETUP RESULTS TEST...

Each result is a line of JSON in the file RESULTS. The wheel's tests ask for the name of the backend at many
places, and a backend with another name than PyTorch's own would be spared most of them. So they are told that
it is Gloo or MPI, and `NETSTORM_TORCH_BACKENDS` makes that NetStorm (`netstorm.frontends.torch.take_over`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.torch.forked_scheduler import fork_schedulers


@dataclass(frozen=True)
class Setup:
    """How the wheel's tests run.

    Attributes:
        backend: what the tests believe it to be.
        ranks: how many there are.
        cpu_for_gpu: what tests put on a GPU stays on the CPU.
    """

    backend: str
    ranks: int = 4
    cpu_for_gpu: bool = False


SETUPS = {
    "netstorm": Setup("netstorm"),
    "gloo": Setup("gloo"),
    "gloo of 8": Setup("gloo", ranks=8),
    "mpi": Setup("mpi"),  # those that PyTorch runs for MPI alone: all-to-all, groups of any size
    "ddp": Setup("gloo", cpu_for_gpu=True),
}


class Record(unittest.TestResult):
    """Writes down how each test ends."""

    def __init__(self, results: Path) -> None:
        super().__init__()
        self._results = results
        self._began = 0.0
        self._last = ("", "")

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 -- unittest's name
        super().startTest(test)
        self._began = time.monotonic()
        self._last = ("passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._last = ("skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._last = ("failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.addError(test, err)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        outcome, text = self._last
        name, seconds = test.id().rpartition(".")[2], round(time.monotonic() - self._began, 2)
        line = {"name": name, "outcome": outcome, "text": text, "seconds": seconds}
        with self._results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def environment(setup: Setup) -> dict[str, str]:
    """Return what the wheel's tests read as they are imported."""
    taken = {} if setup.backend == "netstorm" else {"NETSTORM_TORCH_BACKENDS": setup.backend}
    return {
        "BACKEND": setup.backend,
        "WORLD_SIZE": str(setup.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",  # seconds, of a test
        **taken,
    }


def main(name: str, results: str, *tests: str) -> None:
    """Run tests, one after the other."""
    setup = SETUPS[name]
    os.environ.update(environment(setup))
    from torch.testing._internal.common_distributed import DistTestCases

    importlib.import_module("torch._dynamo.utils")  # as the first DDP does: otherwise each rank, in seconds

    for backends in DistTestCases.backend_feature.values():
        backends.add("netstorm")  # which the name of Gloo has become where they look for it
    if setup.cpu_for_gpu:
        from tests.integration.torch.wheel.cpu_for_gpu import use_the_cpu_for_gpus

        use_the_cpu_for_gpus()
    fork_schedulers()
    cases = importlib.import_module("tests.integration.torch.wheel.distributed").Backend
    cases.setUpClass()
    gc.collect()
    gc.freeze()  # as `fork_server` does: 4 ranks a test end, in a third of the time
    record = Record(Path(results))
    for test in tests:
        cases(test).run(record)


if __name__ == "__main__":
    main(*sys.argv[1:])
