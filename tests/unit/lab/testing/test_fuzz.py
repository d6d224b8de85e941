"""The fuzzer finds planted faults, and repeats itself."""

from __future__ import annotations

from collections.abc import Hashable

from netstorm.errors import FrameError
from netstorm.lab.testing.fuzz import Costs, Fuzzer, FuzzTarget
from netstorm.lab.testing.mutation import mutate_bytes
from netstorm.protocol.frames import bits_from_wire


def target_of(decode: object, seeds: tuple[bytes, ...] = (b"abcdefgh",)) -> FuzzTarget:
    return FuzzTarget(
        name="planted",
        decode=decode,  # type: ignore[arg-type] # the test's own
        allowed=(FrameError,),
        seeds=lambda: list(seeds),
        mutate=mutate_bytes,
        largest=64,
    )


def test_an_exception_that_is_not_declared_is_a_finding_with_its_input() -> None:
    def decode(data: bytes) -> Hashable:
        if b"\xff\xff" in data:
            raise KeyError(data)
        raise FrameError("not this one")

    fuzzer = Fuzzer(target_of(decode), seed=1)
    fuzzer.run(5000)
    assert len(fuzzer.findings) == 1
    assert b"\xff\xff" in fuzzer.findings[0].data
    assert "KeyError" in fuzzer.findings[0].problem


def test_an_input_is_found_again_by_replaying_it() -> None:
    def decode(data: bytes) -> Hashable:
        return 1 // (len(data) - 3)

    assert Fuzzer(target_of(decode), seed=1).replay(b"abcd") is None
    found = Fuzzer(target_of(decode), seed=1).replay(b"abc")
    assert found is not None
    assert found.data == b"abc"


def test_equal_seeds_make_equal_inputs() -> None:
    seen: list[list[bytes]] = []
    for seed in (1, 1, 2):
        inputs: list[bytes] = []
        Fuzzer(target_of(lambda _: None), seed=seed).run(300, inputs.append)
        seen.append(inputs)
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


def test_a_decoder_that_does_not_return_is_a_finding(monkeypatch) -> None:
    def decode(data: bytes) -> Hashable:
        while True:
            pass

    monkeypatch.setattr("netstorm.lab.testing.fuzz._HANG_S", 0.05)
    found = Fuzzer(target_of(decode), seed=1).replay(b"abc")
    assert found is not None
    assert "Hang" in found.problem


def test_an_input_that_takes_much_memory_is_a_finding() -> None:
    kept = []
    most = Costs.now()[1]  # what tests before this one took, and gave back

    def decode(data: bytes) -> Hashable:
        kept.append(bytes(len(data) << 28))  # zeros: pages that are only claimed
        kept.append(b"x" * (int(most) + (len(data) << 28)))
        return None

    found = Fuzzer(target_of(decode), seed=1).replay(b"a")
    kept.clear()
    assert found is not None
    assert "MiB of memory" in found.problem


def test_inputs_that_execute_new_lines_are_kept() -> None:
    fuzzer = Fuzzer(target_of(bits_from_wire), seed=1)
    fuzzer.run(100)
    assert len(fuzzer.kept) == 1
    assert any(name.endswith("frames.py") for name, _ in fuzzer.lines)
