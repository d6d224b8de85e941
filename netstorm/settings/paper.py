"""The settings of the NetStorm paper (arXiv 2404.11352), with its names, and what belongs to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from netstorm.settings.kinds import one_of, ratio, seconds, setting, switch, whole

__all__ = ["AuxRule", "PaperSettings"]

AuxRule: TypeAlias = Literal["arrival", "queue"]


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """The settings of the NetStorm paper (arXiv 2404.11352), with its names, and what belongs to them."""

    awareness: bool = setting(
        "ENABLE_AWARENESS",
        switch(),
        True,
        "",
        "measure the network from the traffic and re-form the policy as it changes; 0: the first one stays; "
        "not set: it also stays where NETSTORM_NETWORK gives rates, which are believed",
    )
    aux_path: bool = setting(
        "ENABLE_AUX_PATH", switch(), True, "", "use auxiliary paths, where rates of links are known"
    )
    update_rate: float = setting(
        "UPDATE_RATE",
        ratio(),
        0.1,
        "ratio",
        "smallest change of a link, as a part of its rate, for which a new policy is formed; a smaller one "
        "gains less than predictions err; at 0 any that is more than the error of measuring will do",
    )
    update_time_s: float = setting(
        "UPDATE_TIME",
        seconds(),
        5.0,
        "s",
        "time between two looks at whether a new policy is needed; if a link fails there is one at once",
    )
    chunk_size: int = setting(
        "CHUNK_SIZE",
        whole(1),
        32_768,
        "elements",
        "largest chunk, the same on all nodes; the paper's 1000000 costs 1.6 s a hop on a 20 Mbit/s link, "
        "65536 costs 4 to 19 % on a WAN of nine nodes. If it is not given, and NETSTORM_NETWORK says that it "
        "takes the typical link more than 20 ms: a half or a quarter",
    )
    largest_chunk: int = setting(
        "NETSTORM_LARGEST_CHUNK",
        whole(0),
        0,
        "elements",
        "to what chunks grow in a key that would have over 256; 0: twice CHUNK_SIZE. If all nodes are on one "
        "machine, and there is no NETSTORM_NETWORK: in a key that would have over 32, 32 times CHUNK_SIZE",
    )
    num_roots: int = setting(
        "NUM_ROOT_SERVERS", whole(0), 0, "nodes", "how many nodes are roots of a tree; 0: all of them"
    )
    primary_busy_bound: int = setting(
        "PRIMARY_BUSY_BOUND",
        whole(1),
        2,
        "chunks",
        "chunks on a link beyond which its auxiliary paths are used, by the rule `queue`",
    )
    auxiliary_queue_length: int = setting(
        "AUXILIARY_QUEUE_LENGTH",
        whole(0),
        1,
        "chunks",
        "most chunks on an auxiliary path, by the rule `queue`",
    )
    aux_rule: AuxRule = setting(
        "NETSTORM_AUX_RULE",
        one_of(*get_args(AuxRule)),
        "arrival",
        "",
        "when a chunk takes an auxiliary path; arrival: if it is expected to arrive clearly earlier; queue: "
        "the paper's, if more than PRIMARY_BUSY_BOUND chunks are on the link and fewer than "
        "AUXILIARY_QUEUE_LENGTH on the path",
    )
    explore_share: float = setting(
        "NETSTORM_EXPLORE_SHARE",
        ratio(),
        0.01,
        "ratio",
        "part of the chunks that take a path over links that no tree uses, so that they are measured; five "
        "times as many until each such path has been tried",
    )
    probe_chunk_size: int = setting(
        "PROBE_CHUNK_SIZE",
        whole(0),
        0,
        "elements",
        "smallest chunk that measures a link (of float32: other types count by their bytes); 0: a quarter of "
        "CHUNK_SIZE",
    )
    probe_chunk_num: int = setting(
        "PROBE_CHUNK_NUM", whole(1), 4, "chunks", "how many chunks make one measurement of a link"
    )
    estimator: Literal["tcp", "busy", "paper"] = setting(
        "NETSTORM_ESTIMATOR",
        one_of("tcp", "busy", "paper"),
        "tcp",
        "",
        "how a link's rate is estimated: tcp, by what the kernel has delivered while there was something to "
        "send, and as busy else; busy, bits of busy periods over their durations, which hardly needs clocks; "
        "paper, the mean of size / (arrival - sent_at), which needs them synchronised",
    )
