"""Settings of the NetStorm paper (arXiv 2404.11352), with its names, and closely related ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from netstorm.settings.kinds import one_of, ratio, seconds, setting, switch, whole

__all__ = ["AuxRule", "PaperSettings"]

AuxRule: TypeAlias = Literal["arrival", "queue"]


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Settings of the NetStorm paper (arXiv 2404.11352), with its names, and closely related ones."""

    awareness: bool = setting(
        "ENABLE_AWARENESS",
        switch(),
        True,
        "",
        "measure the network from the traffic, and form a new policy when it changes; 0: keep the first "
        "policy; not set: 1, but 0 if NETSTORM_NETWORK gives rates",
    )
    aux_path: bool = setting(
        "ENABLE_AUX_PATH", switch(), True, "", "use auxiliary paths where the rates of links are known"
    )
    update_rate: float = setting(
        "UPDATE_RATE",
        ratio(),
        0.1,
        "ratio",
        "smallest change of a link's rate, relative to the rate, for which a new policy is formed; 0: any "
        "change that exceeds the measurement error",
    )
    update_time_s: float = setting(
        "UPDATE_TIME",
        seconds(),
        5.0,
        "s",
        "time between two checks whether a new policy is needed; a failed link is handled at once",
    )
    chunk_size: int = setting(
        "CHUNK_SIZE",
        whole(1),
        32_768,
        "elements",
        "largest chunk, the same on all nodes; larger chunks take longer on each hop: the paper's "
        "1000000 takes 1.6 s on a 20 Mbit/s link. Not set: a half or a quarter of the default if a chunk "
        "takes more than 20 ms on the typical link of NETSTORM_NETWORK",
    )
    largest_chunk: int = setting(
        "NETSTORM_LARGEST_CHUNK",
        whole(0),
        0,
        "elements",
        "largest chunk in a key of more than 256 chunks; 0: twice CHUNK_SIZE. Without NETSTORM_NETWORK and "
        "with all nodes on one machine: 32 times CHUNK_SIZE, in a key of more than 6 chunks",
    )
    num_roots: int = setting(
        "NUM_ROOT_SERVERS", whole(0), 0, "nodes", "number of nodes that are roots of a tree; 0: all nodes"
    )
    primary_busy_bound: int = setting(
        "PRIMARY_BUSY_BOUND",
        whole(1),
        2,
        "chunks",
        "with the rule `queue`: chunks queued on a link above which its auxiliary paths are used",
    )
    auxiliary_queue_length: int = setting(
        "AUXILIARY_QUEUE_LENGTH",
        whole(0),
        1,
        "chunks",
        "with the rule `queue`: largest number of chunks on an auxiliary path",
    )
    aux_rule: AuxRule = setting(
        "NETSTORM_AUX_RULE",
        one_of(*get_args(AuxRule)),
        "arrival",
        "",
        "rule by which a chunk takes an auxiliary path; arrival: if it should arrive clearly earlier; "
        "queue, the paper's: if more than PRIMARY_BUSY_BOUND chunks are on the link and fewer than "
        "AUXILIARY_QUEUE_LENGTH on the path",
    )
    explore_share: float = setting(
        "NETSTORM_EXPLORE_SHARE",
        ratio(),
        0.01,
        "ratio",
        "fraction of the chunks that are sent over links that no tree uses, in order to measure them; five "
        "times as many until each such path was used once",
    )
    probe_chunk_size: int = setting(
        "PROBE_CHUNK_SIZE",
        whole(0),
        0,
        "elements",
        "smallest chunk that counts as a measurement of a link, in float32 elements; 0: a quarter of "
        "CHUNK_SIZE",
    )
    probe_chunk_num: int = setting(
        "PROBE_CHUNK_NUM", whole(1), 4, "chunks", "number of chunks in one measurement of a link"
    )
    estimator: Literal["tcp", "busy", "paper"] = setting(
        "NETSTORM_ESTIMATOR",
        one_of("tcp", "busy", "paper"),
        "tcp",
        "",
        "bandwidth estimator; tcp: bytes that the kernel delivered while data was queued, else busy; busy: "
        "bits of busy periods over their durations, which hardly depends on clocks; paper: mean of "
        "size / (arrival - sent_at), which needs synchronised clocks",
    )
