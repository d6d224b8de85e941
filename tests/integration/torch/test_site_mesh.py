"""Two sites of two ranks: meshes, sums over Gloo inside and NetStorm across, DDP and HSDP over them."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import sites

SITES = ["a", "b", "a", "b"]


def test_sums_over_sites_are_those_over_all_ranks_whatever_the_shape_and_type(ranks):
    ranks.start(sites.sums, 4, sites=SITES)
    answers = ranks.answers()
    for one in answers:
        assert one["wrong"] == []
        assert one["rows"] == [2.5]
        assert one["many"] is True
        assert one["refused"] == [True] * 5
        assert one["mesh"] == [[0, 2], [1, 3]]
    assert [one["groups"] for one in answers] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]


def test_ddp_with_the_hook_and_hsdp_on_the_mesh_have_ddps_own_gradients(ranks):
    ranks.start(sites.gradients, 4, sites=SITES)
    for one in ranks.answers():
        assert one["hooked"] < 1e-5
        assert one["sharded"] < 1e-5
        assert one["same"] is True


def test_a_rank_that_is_lost_fails_the_sum_at_all_others(ranks):
    ranks.start(sites.lost_rank, 4, sites=SITES)
    ended = [ranks.end(rank) for rank in range(4)]
    errors = [json.loads((ranks.folder / f"answer{rank}").read_text()) for rank in range(4)]
    assert all(errors[:3])
    assert "rank 3" in errors[2]  # rank 3's own site hears of it from Gloo, which names nobody
    # A failed job never ends with exit code 0, even if the program has caught the error.
    assert any(end.code for end in ended), [end.text for end in ended]


def test_sites_of_different_sizes_are_an_error_at_all_ranks_that_lists_them(ranks):
    ranks.start(sites.uneven, 4, sites=["a", "b", "a", "a"])
    assert {error.partition(". ")[0] for error in ranks.answers()} == {
        "the sites have different numbers of ranks: a: 3 ranks (0, 2, 3); b: 1 rank (1)"
    }
