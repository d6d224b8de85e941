from __future__ import annotations

import pytest

from netstorm.errors import UsageError

pytest.importorskip("torch", reason="PyTorch is not installed")


def test_sites_are_in_the_order_of_their_lowest_ranks():
    from netstorm.frontends.torch.site_mesh import ranks_by_site

    assert ranks_by_site(["tokyo", "paris", "tokyo", "paris"]) == [[0, 2], [1, 3]]
    assert ranks_by_site(["z", "a"]) == [[0], [1]]
    assert ranks_by_site(["here", "here"]) == [[0, 1]]


def test_sites_of_different_sizes_are_listed():
    from netstorm.frontends.torch.site_mesh import ranks_by_site

    with pytest.raises(UsageError) as caught:
        ranks_by_site(["tokyo", "paris", "tokyo"])
    assert "tokyo: 2 ranks (0, 2); paris: 1 rank (1)" in str(caught.value)
    assert "set NETSTORM_SITE" in str(caught.value)


def test_a_mesh_needs_process_groups():
    from netstorm.frontends.torch.site_mesh import site_mesh

    with pytest.raises(UsageError, match="call init_process_group first"):
        site_mesh()
