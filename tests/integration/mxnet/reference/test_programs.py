"""The same random programs of KVStore calls on MXNet's own `dist_sync` and on NetStorm: the same results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.reference.programs import OPTIMISERS, Program, program
from tests.integration.mxnet.reference.servers import run_with_servers

SCRIPT = """
import faulthandler, json
faulthandler.dump_traceback_later(190, exit=True)
import numpy as np
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.reference.programs import play, program

STORE, FOLDER, PROGRAMS = {store!r}, {folder!r}, json.loads({programs!r})
kv = mx.kv.create(STORE)
names, arrays = [], []

def keep(name, array):
    names.append(name)
    arrays.append(array)

for one in PROGRAMS:
    play(kv, program(**one), keep, wait=STORE == "dist_sync")
np.savez(f"{{FOLDER}}/{{STORE}}.{{kv.rank}}.npz", *arrays, names=np.array(names))
kv._barrier()
"""

SETTINGS: dict[str, Any] = {"MXNET_KVSTORE_BIGARRAY_BOUND": 1000, "CHUNK_SIZE": 700}
"""Some keys are spread over all servers, and have several chunks."""


def compare(folder: Path, nodes: int, programs: list[Program], *, strings: bool) -> int:
    """Run programs on both; return how many arrays have been compared, on each rank."""
    arguments = json.dumps(
        [dict(seed=one.seed, strings=strings, optimiser=one.optimiser) for one in programs]  # noqa: C408
    )
    scripts = {
        store: SCRIPT.format(store=store, folder=str(folder), programs=arguments)
        for store in ("dist_sync", "dist_sync_netstorm")
    }
    run_with_servers(folder, nodes, scripts["dist_sync"], timeout_s=200, **SETTINGS)
    ended = run_job(folder, nodes, scripts["dist_sync_netstorm"], **SETTINGS)
    assert [end.code for end in ended] == [0] * nodes, ended
    by_seed = {one.seed: one for one in programs}
    compared = 0
    for rank in range(nodes):
        with (
            np.load(folder / f"dist_sync.{rank}.npz") as theirs,
            np.load(folder / f"dist_sync_netstorm.{rank}.npz") as ours,
        ):
            assert theirs["names"].tolist() == ours["names"].tolist()
            for place, name in enumerate(theirs["names"]):
                expected, found = theirs[f"arr_{place}"], ours[f"arr_{place}"]
                one = by_seed[int(str(name).split(",")[0].split()[1])]
                if one.exact:
                    same = expected.tobytes() == found.tobytes()
                else:
                    same = np.allclose(expected, found, rtol=Program.FLAWLESS, atol=1e-6)
                assert same, f"rank {rank}, {one.optimiser or 'no optimiser'}, {name}: {expected} != {found}"
                compared += 1
    return compared // nodes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strings", [False, True])
def test_random_programs_have_the_results_of_mxnets_servers(tmp_path: Path, *, strings: bool) -> None:
    """Programs without an optimiser come first: MXNet's servers cannot go back to none.

    Half of the optimisers have keys of either type.
    """
    names = ["", "", *list(OPTIMISERS)[strings::2]]
    programs = [
        program(100 * strings + place, strings=strings, optimiser=name) for place, name in enumerate(names)
    ]
    assert compare(tmp_path, 3, programs, strings=strings) > 150
