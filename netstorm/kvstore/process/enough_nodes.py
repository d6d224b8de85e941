"""Programs of elastic jobs wait while fewer nodes are there than NETSTORM_ELASTIC demands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from netstorm import clock
from netstorm.errors import WaitTimeout
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["wait_for_enough_nodes"]

_log = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
"""How often a program that waits looks whether nodes have come."""
_REPORT_S: Final = 10.0


def wait_for_enough_nodes(runtime: Runtime, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait while too few nodes are in an elastic job. Costs nothing if there are enough.

    Args:
        runtime: of this process.
        meanwhile: called at each look.

    Raises:
        WaitTimeout: nobody has come for NETSTORM_WAIT_FOR_NODES.
        NetStormError: the job has failed.
    """
    settings, live = runtime.settings, runtime.node.requests.live
    fewest = (settings.elastic_range or (0, 0))[0]
    if len(live.ranks) >= fewest:
        return
    limit_s = settings.wait_for_nodes_s
    begun = clock.monotonic()
    reported = begun - _REPORT_S
    while len(live.ranks) < fewest:
        runtime.check()
        meanwhile()
        now = clock.monotonic()
        here = f"{len(live.ranks)} nodes (ranks {', '.join(map(str, live.ranks))})"
        if now - begun > limit_s:
            raise WaitTimeout(
                f"the job has {here} and needs at least {fewest} (NETSTORM_ELASTIC={settings.elastic}); no "
                f"others came within {limit_s:g} s (NETSTORM_WAIT_FOR_NODES)"
            )
        if now - reported >= _REPORT_S:
            reported = now
            _log.warning(
                "the job has %s and waits until there are %d (NETSTORM_ELASTIC=%s), at most %.0f s more",
                here,
                fewest,
                settings.elastic,
                limit_s - (now - begun),
            )
        clock.sleep(_LOOK_S)
