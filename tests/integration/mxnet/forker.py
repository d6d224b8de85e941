"""A process that has imported MXNet too, and forks as `integration.forker` does: the import takes 1.6 s."""

from __future__ import annotations

import importlib

from tests.integration.fork_server import serve
from tests.integration.forker import run

if __name__ == "__main__":
    importlib.import_module("netstorm.frontends.mxnet")
    importlib.import_module("tests.integration.mxnet.on_nodes")  # and pytest, for tests that run on nodes
    serve(run)
