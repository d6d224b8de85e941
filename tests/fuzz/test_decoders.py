"""No input makes a decoder raise what it does not declare, or take long, or much memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from netstorm.lab.testing.fuzz import Fuzzer, FuzzTarget, load_corpus

CORPUS: Final = Path(__file__).parent / "corpus"

INPUTS: Final = 220_000
"""Of the slow test, over all decoders."""


def test_every_input_of_the_corpus_is_withstood(targets: dict[str, FuzzTarget]) -> None:
    for target in targets.values():
        corpus = load_corpus(CORPUS, target.name)
        fuzzer = Fuzzer(target, seed=0, corpus=corpus)
        fuzzer.run(len(target.seeds()) + len(corpus))
        assert [finding.problem for finding in fuzzer.findings] == []


def test_the_corpus_is_of_decoders_that_are_there(targets: dict[str, FuzzTarget]) -> None:
    assert {path.name for path in CORPUS.iterdir()} <= targets.keys()


def test_most_valid_inputs_are_decoded(targets: dict[str, FuzzTarget]) -> None:
    """Otherwise what is behind the first check would never be reached."""
    for target in targets.values():
        refused = 0
        for seed in target.seeds():
            try:
                target.decode(seed)
            except target.allowed:
                refused += 1
        assert refused <= len(target.seeds()) // 2, target.name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_200000_mutated_inputs_are_withstood(targets: dict[str, FuzzTarget]) -> None:
    unit = INPUTS / sum(target.weight for target in targets.values())
    inputs = 0
    for target in targets.values():
        fuzzer = Fuzzer(target, seed=1, corpus=load_corpus(CORPUS, target.name))
        fuzzer.run(round(unit * target.weight))
        inputs += fuzzer.inputs
        assert [finding.problem for finding in fuzzer.findings] == []
    assert inputs >= 200_000
