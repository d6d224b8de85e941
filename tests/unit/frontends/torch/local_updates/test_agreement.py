"""Settings that ranks must agree on."""

from __future__ import annotations

import pytest

from netstorm.errors import Disagreement

pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.ranks import check_agreement


def test_equal_settings_agree():
    check_agreement("DiLoCo", [{"sync_every": 3, "codec": "int8"}] * 3)


def test_the_message_names_each_setting_that_differs_and_both_ranks():
    settings = {"sync_every": 3, "codec": "int8", "fragments": 2}

    with pytest.raises(Disagreement) as error:
        check_agreement("DiLoCo", [settings, settings, {**settings, "sync_every": 4, "codec": "float32"}])

    assert str(error.value) == (
        "DiLoCo: sync_every is 3 at rank 0 and 4 at rank 2; codec is int8 at rank 0 and float32 at rank 2:"
        " all ranks must be given the same"
    )


def test_a_setting_that_one_rank_lacks_is_a_difference():
    with pytest.raises(Disagreement, match="codec is int8 at rank 0 and None at rank 1"):
        check_agreement("DiLoCo", [{"codec": "int8"}, {}])
