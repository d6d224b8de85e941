#!/usr/bin/env python3
"""Fuzzes one decoder with atheris, which is libFuzzer guided by the coverage of every input.

    pip install 'netstorm[fuzz]'
    benchmarks/security/fuzz.py DECODER [CORPUS...] [-max_total_time=600] [other options of libFuzzer]

libFuzzer prints a failing input's file; with that file in place of a corpus it decodes just this one.
`tests/fuzz/corpus/DECODER` is a corpus to begin with; inputs that execute new lines are added to the first.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("atheris is missing: pip install 'netstorm[fuzz]'")
    with atheris.instrument_imports(include=["netstorm"]):
        withstand = importlib.import_module("netstorm.lab.testing.decoders").withstand
        targets = {target.name: target for target in importlib.import_module("decoders.registry").TARGETS}
    if len(sys.argv) < 2 or sys.argv[1] not in targets:
        sys.exit(f"usage: {sys.argv[0]} DECODER [libFuzzer's options], with one of {', '.join(targets)}")
    target = targets[sys.argv.pop(1)]
    logging.disable()
    seeds = target.seeds()

    def decode(data: bytes) -> None:
        withstand(target, data)

    def mutate(data: bytes, largest: int, seed: int) -> bytes:
        chance = random.Random(seed)
        other = chance.choice(seeds)
        made: bytes = target.mutate(chance, data or other, other)
        return made[:largest]

    atheris.Setup([sys.argv[0], f"-max_len={target.largest}", *sys.argv[1:]], decode, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
