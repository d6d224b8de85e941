"""One node of `estimates.py --wan`: sums arrays of ones, and writes what it has measured of its links.

    workers/estimates.py FOLDER ROUNDS MEGABYTES [caps]

With `caps` also what the scheduler, which must show the job on all its interfaces, knows of its access line.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import msgspec
import numpy as np

from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.observe.web import read_token
from netstorm.settings import Settings


def _cap(settings: Settings, rank: int) -> dict[str, float]:
    """Return what the scheduler knows of this rank's access line, in bit/s; 0: nothing."""
    where = f"http://{settings.scheduler_host}:{settings.scheduler_port + 1}/status.json"
    token = read_token(Path(settings.web_token_file), "NETSTORM_WEB_TOKEN_FILE")
    request = urllib.request.Request(where, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10.0) as answer:  # noqa: S310 -- http, as above
        node = json.load(answer)["nodes"][rank]
    return {word: node[word] or 0.0 for word in ("egress", "ingress")}


def main() -> None:
    """Take part in the rounds that the command line asks for."""
    folder, rounds, megabytes = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    settings = Settings.from_environment()
    runtime = Runtime(settings)
    try:
        source = np.ones(int(megabytes * 1e6 / 4), np.float32)
        total = np.empty_like(source)
        key = runtime.register(runtime.open_namespace(), "tensor", source.shape, "float32")
        for _ in range(rounds):
            operation = Operation(
                key=key,
                round=key.take_round(),
                source=source,
                destination=total,
                done=lambda _: None,
            )
            runtime.allreduce(operation)
            if not (total == runtime.size).all():
                raise AssertionError("a wrong sum")
        runtime.process.drain()
        measured = runtime.process.measured()
        found = {
            "cap": _cap(settings, runtime.rank) if "caps" in sys.argv[4:] else None,
            "measured": None if measured is None else msgspec.to_builtins(measured),
            "statistics": runtime.statistics(),
        }
        (folder / f"{runtime.rank}.json").write_text(json.dumps(found), encoding="utf-8")
        runtime.finish()
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
