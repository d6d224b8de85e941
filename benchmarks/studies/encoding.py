#!/usr/bin/env python3
"""What it takes to encode and decode a gradient under each codec, on one core. Prints JSON with --json FILE.

    python benchmarks/studies/encoding.py                            65,536 float32: 256 KiB
    python benchmarks/studies/encoding.py --elements 8388608         a large layer

Encoding is all that a rank computes until its last payload is ready: for codecs of two rounds, also the
first round's payload and its result. Decoding begins when the last result is there. Only this rank
contributes, with as few levels as in a job of --ranks ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import number
from netstorm.compression.codec import Codec, GradientPlace, State
from netstorm.compression.registry import codec_of
from netstorm.kvstore.forms import Key

CODECS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "none"},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "int8"},
    {"type": "int8", "rounding": "stochastic"},
    {"type": "2bit"},
    {"type": "1bit"},
    {"type": "topk"},
    {"type": "bsc"},
    {"type": "powersgd"},
)

_ROWS: Final = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    options = _options(arguments)
    rows = [
        measured(description, options.elements, options.ranks, options.repetitions) for description in CODECS
    ]
    print(
        f"{options.elements} float32, {options.ranks} ranks, median of {options.repetitions}, processor time"
    )
    print(f"{'codec':40} {'encode, ms':>10} {'decode, ms':>10} {'payload':>8}")
    for row in rows:
        print(f"{row['codec']:40} {row['encode_ms']:10.3f} {row['decode_ms']:10.3f} {row['part']:8.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measured(description: Mapping[str, Any], elements: int, ranks: int, repetitions: int) -> dict[str, Any]:
    """Return the median processor times of a codec, and its payload's part of the bytes of float32."""
    codec, shape = codec_of(description), (_ROWS, elements // _ROWS)
    own = Key(0, "w", shape, "float32", form=codec.form(shape) or 0)
    keys = [own, *(Key(0, part.suffix, (part.elements,), "float32") for part in codec.parts(shape))]
    drawn = np.random.default_rng(1)
    state: State = {}
    encoding, decoding, payload = [], [], 0
    for round in range(repetitions + 2):
        gradient = drawn.standard_normal(elements, np.float32)
        times, payload = _one(codec, keys, gradient, state, GradientPlace(shape, ranks, 0, round))
        encoding.append(sum(times[:-1]))
        decoding.append(times[-1])
    return {
        "codec": " ".join(str(value) for value in description.values()),
        "encode_ms": 1000 * statistics.median(encoding[2:]),
        "decode_ms": 1000 * statistics.median(decoding[2:]),
        "part": payload / (4 * elements),
    }


def _one(
    codec: Codec, keys: Sequence[Key], gradient: npt.NDArray[np.float32], state: State, place: GradientPlace
) -> tuple[list[float], int]:
    """Return the times from result to payload, and at the end from result to gradient; and the payloads'
    bytes.
    """
    rounds, size, begun = codec.rounds(gradient, state, place), 0, time.process_time()
    times: list[float] = []
    transfer = next(rounds)
    while True:
        key = keys[transfer.part]
        form = key.form_of(transfer.codec)
        assert form is not None
        total = form.new_sum()
        total.add_own(form.own(transfer.source, 0, key.elements), 1)
        payload = total.to_send()
        times.append(time.process_time() - begun)
        received = None if payload is None else bytearray(payload)
        size += 0 if received is None else len(received)
        begun = time.process_time()
        form.write(transfer.destination, 0, key.elements, received, 1)
        try:
            transfer = rounds.send(1)
        except StopIteration:
            times.append(time.process_time() - begun)
            return times, size


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=number, default=65_536, help="of the gradient (%(default)s)")
    parser.add_argument("--ranks", type=number, default=9, help="of the job (%(default)s)")
    parser.add_argument("--repetitions", type=number, default=200, help="gradients (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
