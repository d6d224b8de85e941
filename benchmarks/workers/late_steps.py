"""A rank of `studies/datagrams.py`: computes, sums, and begins anew, without a framework.

Arguments: elements of the model, its keys, seconds of computing a step, seconds to train, folder for results,
and what of the lane is left out (`VARIANTS`). It writes how long its steps took, and the first layer's sum,
after the first fifth of the time, what came too late, and how much of a processor it used.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from netstorm.kvstore.operations import Operation
from netstorm.kvstore.options import loss_terms
from netstorm.kvstore.process.runtime import Runtime
from netstorm.observe.log import configure_logging
from netstorm.pslite.datagram import marks
from netstorm.pslite.datagram.lane import ReceivingLane
from netstorm.pslite.datagram.lanes import LaneArrival, Lanes
from netstorm.settings import Settings

# A lane without one of its mechanisms: the product has no switches for that.


def mark_alike() -> None:
    """Have all packets carry the same code point: neither queues nor dropping tell them apart."""
    known = marks.assured_forwarding
    marks.assured_forwarding = lambda queue, *, important: known(1, important=True)  # noqa: ARG005


def mark_classes() -> None:
    """Have packets carry the class of their layer alone."""
    known = marks.assured_forwarding
    marks.assured_forwarding = lambda queue, *, important: known(queue, important=True)  # noqa: ARG005


def mark_importance() -> None:
    """Have packets carry their drop precedence alone."""
    known = marks.assured_forwarding
    marks.assured_forwarding = lambda queue, *, important: known(1, important=important)  # noqa: ARG005


def keep_order() -> None:
    """Hand over messages in their order: each waits for all that were begun before it, as on a connection."""
    receive, put = Lanes.receive, ReceivingLane._put  # noqa: SLF001
    held: list[tuple[int, LaneArrival]] = []
    numbers: dict[int, int] = {}

    def numbered(lane: ReceivingLane, number: int, part: Any) -> Any:
        whole = put(lane, number, part)
        if whole is not None:
            numbers[id(whole)] = number
        return whole

    def in_order(lanes: Lanes, now: float) -> Iterator[LaneArrival]:
        # What is tried again has no number any more.
        held.extend((numbers.pop(id(arrived.whole), 0), arrived) for arrived in receive(lanes, now))
        held.sort(key=lambda one: one[0])
        for one in list(held):
            number, arrived = one
            lane = arrived.lane
            if all(before in lane._done for before in range(lane._floor, number)):  # noqa: SLF001
                held.remove(one)
                yield arrived

    ReceivingLane._put = numbered  # type: ignore[method-assign,assignment]  # noqa: SLF001
    Lanes.receive = in_order  # type: ignore[method-assign,assignment]


VARIANTS: Final[Mapping[str, Callable[[], None]]] = {
    "": lambda: None,
    "ordered": keep_order,
    "alike": mark_alike,
    "classes": mark_classes,
    "importance": mark_importance,
    "waiting": lambda: None,
}


def main() -> None:
    """Train, and write what was measured."""
    VARIANTS[sys.argv[6]]()
    elements, keys = int(sys.argv[1]), int(sys.argv[2])
    compute_s, seconds, folder = float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5])
    settings = Settings.from_environment()
    configure_logging(settings)
    runtime = Runtime(settings)
    namespace = runtime.open_namespace()
    made = [runtime.register(namespace, f"layer{number}", (elements,), "float32") for number in range(keys)]
    gradient = np.random.default_rng(runtime.rank).standard_normal(elements).astype(np.float32) ** 2
    gradient[0] = 0.0
    kept = [np.zeros(elements, np.float32) for _ in made]
    sums = [np.zeros(elements, np.float32) for _ in made]
    times: list[float] = []
    firsts: list[float] = []
    first_at = [0.0]
    began = begun = time.monotonic()
    worked_s = time.process_time()
    counted, steps = 0.0, 0
    left = threading.Semaphore(0)
    terms = loss_terms(settings)

    def done(number: int, _: object) -> None:
        if not number:
            first_at[0] = time.monotonic()
        left.release()

    while sums[0][0] == 0:
        time.sleep(compute_s)
        for number, key in enumerate(made):
            kept[number] += gradient
            kept[number][0] = not number and runtime.rank == 0 and time.monotonic() - began > seconds
            source = kept[number] if terms else kept[number].copy()
            if not terms:
                kept[number][:] = 0
            runtime.submit(
                Operation(
                    key=key,
                    round=key.take_round(),
                    source=source,
                    destination=sums[number],
                    done=partial(done, number),
                    priority=-number,
                    loss=terms,
                )
            )
        for _ in made:
            left.acquire()
        now = time.monotonic()
        if begun - began > seconds / 5:
            times.append(now - begun)
            firsts.append(first_at[0] - begun)
        begun, steps = now, steps + 1
        counted += sum(float(one[1:].sum()) for one in sums)
    runtime.barrier()
    late = sum(float(one[1:].sum()) for one in kept) / (float(gradient[1:].sum()) * keys)
    answer = {"times": times, "firsts": firsts, "steps": steps, "sum": counted, "late": late}
    answer |= {"cpu": (time.process_time() - worked_s) / (begun - began), "counters": runtime.statistics()}
    (folder / f"rank{runtime.rank}.json").write_text(json.dumps(answer))
    runtime.finish()
    runtime.close()


if __name__ == "__main__":
    main()
