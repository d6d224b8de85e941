#!/usr/bin/env python3
"""Fuzzes the decoders of NetStorm: everything that reads bytes which others have written.

    benchmarks/security/fuzz.py [--minutes N | --inputs N] [--decoder NAME]... [--seed N] [--json FILE]
    benchmarks/security/fuzz.py --decoder NAME --replay FILE

Exit code 1: an input was found that a decoder does not withstand. Its file, and the command that replays it,
are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decoders.registry import TARGETS
from harness.arguments import number, seconds
from netstorm.lab.testing.fuzz import Finding, Fuzzer, bounded_memory, input_name, load_corpus, save_corpus

CORPUS: Final = Path(__file__).resolve().parents[2] / "tests" / "fuzz" / "corpus"

_BATCH: Final = 2000
"""Inputs of a target of weight 1 until the next one has its turn."""

_LINE_S: Final = 20.0
_MOST_ADDRESSES: Final = 4 * 2**30
"""Bytes: an input that makes a decoder claim gigabytes has a MemoryError."""


def main() -> int:
    """Fuzz, or replay one input."""
    options = _arguments()
    faulthandler.enable()
    logging.disable()  # decoders log what they drop
    chosen = [target for target in TARGETS if not options.decoder or target.name in options.decoder]
    with bounded_memory(_MOST_ADDRESSES):
        if options.replay is not None:
            finding = Fuzzer(chosen[0], seed=0).replay(options.replay.read_bytes())
            print(finding.problem if finding else "nothing is wrong with this input")
            return int(finding is not None)
        fuzzers = [
            Fuzzer(target, seed=options.seed, corpus=load_corpus(options.corpus, target.name))
            for target in chosen
        ]
        result = _run(fuzzers, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.grow:
        for fuzzer in fuzzers:
            save_corpus(options.corpus, fuzzer.target.name, fuzzer.kept)
    return int(any(fuzzer.findings for fuzzer in fuzzers))


def _run(fuzzers: list[Fuzzer], options: argparse.Namespace) -> dict[str, Any]:
    began = said = time.monotonic()
    shown: set[Finding] = set()
    with _last_input(options.findings) as current:
        while True:
            for fuzzer in fuzzers:
                fuzzer.run(max(1, round(_BATCH * fuzzer.target.weight)), current(fuzzer.target.name))
                for finding in fuzzer.findings:
                    if finding not in shown:
                        shown.add(finding)
                        _report(finding, options.findings)
            total = sum(fuzzer.inputs for fuzzer in fuzzers)
            now = time.monotonic()
            done = total >= options.inputs if options.inputs else now - began >= 60 * options.minutes
            if done or now - said > _LINE_S:
                said = now
                print(f"{now - began:7.0f} s  {total:12,} inputs  {len(shown)} findings", flush=True)
            if done:
                break
    result = _result(fuzzers, options.seed, time.monotonic() - began)
    _print(result)
    return result


def _report(finding: Finding, folder: Path) -> None:
    save_corpus(folder, finding.target, [finding.data])
    path = folder / finding.target / input_name(finding.data)
    print(f"\n{finding.target}: {finding.problem.strip()}")
    print(f"replay: {Path(sys.argv[0])} --decoder {finding.target} --replay {path}\n", flush=True)


@contextmanager
def _last_input(folder: Path) -> Iterator[Callable[[str], Callable[[bytes], None]]]:
    """Keep the present input in a file: if the process dies of it, it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "last-input"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:

        def of_target(name: str) -> Callable[[bytes], None]:
            label = f"{name}\n".encode()

            def note(data: bytes) -> None:
                whole = label + len(data).to_bytes(4, "big") + data
                memory[: len(whole)] = whole

            return note

        yield of_target
    path.unlink()


def _result(fuzzers: list[Fuzzer], seed: int, took_s: float) -> dict[str, Any]:
    return {
        "inputs": sum(fuzzer.inputs for fuzzer in fuzzers),
        "seconds": round(took_s, 1),
        "seed": seed,
        "findings": sum(len(fuzzer.findings) for fuzzer in fuzzers),
        "decoders": {
            fuzzer.target.name: {
                "inputs": fuzzer.inputs,
                "lines": len(fuzzer.lines),
                "kept": len(fuzzer.kept),
                "slowest_ms": round(fuzzer.slowest * 1e3, 1),
                "findings": [finding.problem.strip().splitlines()[-1] for finding in fuzzer.findings],
            }
            for fuzzer in fuzzers
        },
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{'decoder':<12}{'inputs':>12}{'lines':>8}{'kept':>7}{'slowest':>10}{'findings':>10}")
    for name, row in result["decoders"].items():
        slowest = f"{row['slowest_ms']:.0f}ms"
        print(
            f"{name:<12}{row['inputs']:>12,}{row['lines']:>8}{row['kept']:>7}{slowest:>10}"
            f"{len(row['findings']):>10}"
        )
    print(f"{result['inputs']:,} inputs in {result['seconds']:.0f} s, seed {result['seed']}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzzes the decoders of NetStorm.")
    parser.add_argument("--minutes", type=seconds, default=1.0, help="how long, if --inputs is not given")
    parser.add_argument("--inputs", type=number, help="how many inputs, over all decoders")
    parser.add_argument(
        "--decoder", action="append", choices=[target.name for target in TARGETS], help="only this one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--corpus", type=Path, default=CORPUS, metavar="DIR")
    parser.add_argument(
        "--grow", action="store_true", help="add the inputs that showed new lines to the corpus"
    )
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), metavar="DIR")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="decode one input, of one --decoder")
    options = parser.parse_args()
    if options.replay is not None and len(options.decoder or []) != 1:
        parser.error("--replay needs one --decoder")
    return options


if __name__ == "__main__":
    sys.exit(main())
