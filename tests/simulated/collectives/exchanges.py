"""Exchanges of simulated groups, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from netstorm.kvstore.calls import GroupCalls, TensorExchange
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.protocol.codecs import Element, Reduction


def all_reduce(
    values: np.ndarray[Any, Any],
    element: Element,
    reduction: Reduction = Reduction.SUM,
    receivers: tuple[int, ...] = (),
) -> TensorExchange:
    values = values.copy()
    return TensorExchange(
        text=f"all_reduce of {element.name} {values.shape}",
        reduction=reduction,
        element=element,
        segment_bytes=values.nbytes,
        source=(values,),
        destination=(values,),
        receivers=receivers,
    )


def all_gather(rank: int, mine: np.ndarray[Any, Any], size: int) -> TensorExchange:
    return TensorExchange(
        text="all_gather",
        reduction=Reduction.COPY,
        element=Element.BYTES,
        segment_bytes=mine.nbytes,
        source=tuple(mine.view(np.uint8) if index == rank else None for index in range(size)),
        destination=tuple(np.empty(mine.nbytes, np.uint8) for _ in range(size)),
    )


def groups_of(cluster: SimulatedCluster, name: str, members: tuple[int, ...]) -> dict[int, GroupCalls]:
    return {rank: cluster.nodes[rank].group(name, members) for rank in members}


def make_calls(
    cluster: SimulatedCluster, groups: dict[int, GroupCalls], exchanges: dict[int, TensorExchange]
) -> dict[int, Pending]:
    return {rank: cluster.nodes[rank].call(groups[rank], exchanges[rank]) for rank in groups}
