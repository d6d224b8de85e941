"""The wheel's tests of whole backends, `DistributedTest._DistTestBase`, as PyTorch's own
test_distributed_spawn.py runs them.
"""

from __future__ import annotations

import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class Backend(TestDistBackend, DistributedTest._DistTestBase):
    """Each test on new ranks, which are forked: PyTorch and its tests are imported once."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
