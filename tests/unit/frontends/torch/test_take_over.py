from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize(
    ("name", "default", "expected"),
    [
        ("gloo", "", "netstorm"),
        ("mpi", "", "netstorm"),
        ("nccl", "", "nccl"),
        ("netstorm", "", "netstorm"),
        ("real_gloo", "", "real_gloo"),
        ("cpu:gloo,cuda:nccl", "", "cpu:netstorm,cuda:nccl"),
        ("cuda:nccl,cpu: gloo", "", "cuda:nccl,cpu:netstorm"),
        ("cpu:real_gloo", "", "cpu:real_gloo"),
        ("undefined", "gloo", "netstorm"),
        ("undefined", "nccl", "undefined"),
        ("undefined", "", "undefined"),
    ],
)
def test_names_that_are_taken_over_change_and_no_others(name, default, expected):
    from netstorm.frontends.torch.take_over import meaning

    assert meaning(name, frozenset({"gloo", "mpi"}), default) == expected
