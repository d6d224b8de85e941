"""No input makes a decoder raise what it does not declare, or take long, or much memory."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import FrameError
from netstorm.lab.testing.decoders import FuzzTarget, mutate_bytes, withstand

CORPUS: Final = Path(__file__).parent / "corpus"


def inputs_of(target: FuzzTarget) -> list[bytes]:
    """The target's own valid inputs, and those of the corpus, each of which has shown a line of its own."""
    return [*target.seeds(), *(path.read_bytes() for path in sorted((CORPUS / target.name).glob("*")))]


def mutated(target: FuzzTarget) -> st.SearchStrategy[bytes]:
    """Inputs, one to three mutations away from known ones."""
    known = st.sampled_from(inputs_of(target))

    def change(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
        for other in others:
            data = target.mutate(chance, data, other)[: target.largest]
        return data

    return st.builds(change, st.randoms(use_true_random=True), known, st.lists(known, min_size=1, max_size=3))


def fuzz(target: FuzzTarget, inputs: int) -> None:
    @settings(max_examples=inputs, database=None)
    @given(mutated(target))
    def withstands(data: bytes) -> None:
        withstand(target, data)

    withstands()


def test_every_known_input_is_withstood(targets: dict[str, FuzzTarget]) -> None:
    for target in targets.values():
        for data in inputs_of(target):
            withstand(target, data)


def test_the_corpus_is_of_decoders_that_are_there(targets: dict[str, FuzzTarget]) -> None:
    assert {path.name for path in CORPUS.iterdir()} <= targets.keys()


def test_most_valid_inputs_are_decoded(targets: dict[str, FuzzTarget]) -> None:
    """Otherwise what is behind the first check would never be reached."""
    for target in targets.values():
        valid = [withstand(target, seed) for seed in target.seeds()]
        assert sum(valid) * 2 >= len(valid), target.name


def test_mutated_inputs_are_withstood(targets: dict[str, FuzzTarget]) -> None:
    for target in targets.values():
        fuzz(target, 30)


@pytest.mark.slow
def test_hundreds_of_mutated_inputs_are_withstood(targets: dict[str, FuzzTarget]) -> None:
    for target in targets.values():
        fuzz(target, 400)


def planted(decode: object) -> FuzzTarget:
    """A decoder with a fault."""
    return FuzzTarget(
        name="planted",
        decode=decode,  # type: ignore[arg-type] # the test's own
        allowed=(FrameError,),
        seeds=lambda: [b"abcdefgh"],
        mutate=mutate_bytes,
        largest=64,
    )


def test_an_exception_that_is_not_declared_is_found() -> None:
    def decode(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError(data)
        raise FrameError("not this one")

    with pytest.raises(KeyError):
        fuzz(planted(decode), 2000)


@pytest.mark.slow
def test_an_input_that_takes_much_memory_is_found() -> None:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # of tests before this one, too

    def decode(data: bytes) -> None:
        b"x" * (most + (len(data) << 28))  # written: pages that are only claimed do not count

    with pytest.raises(AssertionError, match="MiB of memory for 1 bytes"):
        withstand(planted(decode), b"a")


def test_an_input_that_takes_long_is_found() -> None:
    def decode(_: bytes) -> None:
        sum(range(10**8))

    with pytest.raises(AssertionError, match="processor time for 1 bytes"):
        withstand(planted(decode), b"a")
