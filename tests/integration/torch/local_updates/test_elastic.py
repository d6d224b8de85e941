"""Local updates in elastic jobs of PyTorch: ranks are killed, come back and join, and all stay equal."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch.elastic_ranks import ElasticRanks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.local_updates import elastic_programs


@pytest.mark.parametrize(
    "kind",
    [
        "LocalSGD",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("HFA", "ESync", 'DiLoCo"float32"', 'DiLoCo"int8"')
        ),
    ],
)
def test_who_is_killed_and_comes_back_ends_with_the_same_parameters(
    forker: Any, tmp_path: Path, kind: str
) -> None:
    sites = {"NETSTORM_SITE": "east"}  # HFA's averages of sites are of all that have begun the job
    train = elastic_programs.train
    with ElasticRanks(forker, tmp_path, begin=3, elastic="1:4", **sites) as ranks:
        for rank in range(3):
            ranks.start(str(rank), rank, train, kind=kind)
        ranks.wait_until_said("1", "of [0, 1, 2]")
        ranks.kill("0")
        ranks.wait_until_said("1", "of [1, 2]")
        ranks.start("back", 0, train, kind=kind)
        ranks.start("new", 3, train, kind=kind)
        ranks.wait_until_said("1", "of [0, 1, 2, 3]")
        (tmp_path / "end").touch()
        found = [ranks.answer(name) for name in ("1", "2", "back", "new")]
        ranks.end()
    assert [one["newcomer"] for one in found] == [False, False, True, True]
    assert len({one["parameters"] for one in found}) == 1
    if kind != "ESync":
        assert len({one["steps"] for one in found}) == 1
    for one in found:
        # A rank that has just come may have taken fewer steps; what int8 rounds off comes later.
        assert all(0.9 <= gain <= 4.2 for gain in one["gains"]), one
    assert any(abs(gain - 4) < 0.01 for gain in found[0]["gains"])
    assert found[2]["began"] > 0, "it has begun anew"
