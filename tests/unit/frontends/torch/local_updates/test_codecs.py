"""Codecs: what an average is worth, and what is kept of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.outer_codecs import (  # noqa: E402 - torch may be missing  # noqa: E402
    BLOCK,
    CODECS,
    OuterAverage,
    OuterBFloat16,
    OuterFloat32,
    OuterInt8,
    codecs_of_vectors,
    whole_number_form,
)
from netstorm.frontends.torch.parameters import FlatParameters  # noqa: E402
from tests.unit.frontends.torch.local_updates.lockstep import World, together  # noqa: E402


def updates(ranks, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Magnitudes that differ between blocks, as those of layers do.
    scales = torch.logspace(-6, 3, max(size, 1))[:size]
    return [torch.randn(size, generator=generator) * scales for _ in range(ranks)]


def average(codecs, values, **settings):
    world = World(len(values), **settings)
    return together(
        [
            codec.average(value.clone(), ranks)
            for codec, value, ranks in zip(codecs, values, world.ranks(), strict=True)
        ]
    )


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("ranks", [1, 3, 16, 17])
def test_an_average_is_the_mean_within_the_precision_of_the_codec(name, ranks):
    values = updates(ranks, 1000)

    found = average([CODECS[name]() for _ in values], values)

    expected = torch.stack(values).double().mean(dim=0)
    largest = torch.stack(values).abs().amax(dim=0)
    blocks = torch.nn.functional.pad(largest, (0, 24)).view(-1, BLOCK).amax(dim=1)
    allowed = {
        "float32": largest * 2**-22,
        "bfloat16": largest * ranks * 2**-7,
        "int8": blocks.repeat_interleave(BLOCK)[:1000] / whole_number_form(ranks, short_integers=False)[1],
    }
    for one in found:
        assert one.shape == (1000,)
        assert bool(((one - expected).abs() <= allowed[name]).all())


@pytest.mark.parametrize("name", CODECS)
def test_all_ranks_get_the_same_bits(name):
    values = updates(5, 700)

    first, *others = average([CODECS[name]() for _ in values], values)

    assert all(torch.equal(first, other) for other in others)


@given(
    ranks=st.integers(1, 5), size=st.integers(0, 600), seed=st.integers(0, 2**30), rounds=st.integers(1, 4)
)
def test_error_feedback_loses_nothing(ranks, size, seed, rounds):
    codecs = [OuterInt8() for _ in range(ranks)]
    given_in = torch.zeros(size, dtype=torch.float64)
    come_out = torch.zeros(size, dtype=torch.float64)

    for number in range(rounds):
        values = [value.double() for value in updates(ranks, size, seed + number)]
        given_in += torch.stack(values).sum(dim=0)
        come_out += average(codecs, values)[0] * ranks

    kept = torch.stack([codec.kept() for codec in codecs]).sum(dim=0)
    torch.testing.assert_close(come_out + kept, given_in, rtol=1e-9, atol=1e-9)


def test_what_is_rounded_off_comes_with_the_next_average():
    codec = OuterInt8()
    small, big = 0.3 / 127, 1.0  # a third of a level
    value = torch.tensor([big, small])

    found = [float(average([codec], [value])[0][1]) for _ in range(10)]

    assert found[0] == 0.0
    assert sum(found) == pytest.approx(10 * small, abs=0.5 / 127)


def test_blocks_of_zeros_and_the_smallest_and_largest_numbers_are_right():
    tiny, huge = 1e-44, 3e38
    value = torch.zeros(3 * BLOCK)
    value[BLOCK], value[2 * BLOCK] = tiny, -huge

    [found, _] = average([OuterInt8(), OuterInt8()], [value, value])

    torch.testing.assert_close(found, value, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("bad", "place"), [(math.nan, 0), (math.inf, 299), (-math.inf, 0)])
def test_a_value_that_is_not_finite_shows_in_the_average_of_all_ranks(name, bad, place):
    values = updates(3, 300)
    values[1][place] = bad
    codecs = [CODECS[name]() for _ in values]

    found = average(codecs, values)

    assert not any(bool(torch.isfinite(one).all()) for one in found)
    assert all(codec.kept() is None or bool(torch.isfinite(codec.kept()).all()) for codec in codecs)


@given(ranks=st.integers(1, 100_000), short_integers=st.booleans())
def test_a_sum_of_whole_numbers_never_overflows(ranks, short_integers):
    dtype, levels = whole_number_form(ranks, short_integers=short_integers)

    assert levels >= 7
    assert levels * ranks <= torch.iinfo(dtype).max


def test_numbers_are_int8_up_to_16_ranks_and_int16_beyond_where_it_can_be_summed():
    assert whole_number_form(16, short_integers=False) == (torch.int8, 7)
    assert whole_number_form(17, short_integers=True) == (torch.int16, 1927)
    assert whole_number_form(17, short_integers=False)[0] == torch.int32


def test_what_travels_has_the_size_that_the_name_says():
    for codec, bytes_a_value in ((OuterFloat32(), 4), (OuterBFloat16(), 2), (OuterInt8(), 1)):
        world = World(1)
        together([codec.average(torch.ones(4 * BLOCK), world.ranks()[0])])

        tensor = world.collectives[-1].tensors[0]
        assert tensor.element_size() * tensor.numel() == 4 * BLOCK * bytes_a_value


@pytest.mark.parametrize("name", CODECS)
def test_an_exchange_waits_for_its_last_collective_only_when_it_is_finished(name):
    world = World(1)
    codec = CODECS[name]()
    exchange = OuterAverage(codec, torch.ones(10), world.ranks()[0])

    for _ in range(5):
        exchange.advance()

    assert [collective.waits for collective in world.collectives] == [1] * (codec.collectives - 1) + [0]
    torch.testing.assert_close(exchange.finish(), torch.ones(10))
    assert world.collectives[-1].waits == 1


def test_a_name_that_is_no_codec_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match="codec='int4': there are 'float32', 'bfloat16', 'int8', 'auto'"):
        codecs_of_vectors("int4", None)


@pytest.mark.parametrize("codec", ["topk", {"type": "powersgd", "rank": 2}, {"*.bias": "none", "*": "2bit"}])
def test_codecs_that_need_a_netstorm_group_are_refused_over_others(codec):
    with pytest.raises(UsageError, match=r"none of NetStorm's: such groups have 'float32', 'bfloat16'"):
        codecs_of_vectors(codec, None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", OuterFloat32), ("float32", OuterFloat32), ("bf16", OuterBFloat16), ("int8", OuterInt8)],
)
def test_other_groups_have_codecs_of_their_own_collectives(name, kind):
    flat = FlatParameters([torch.ones(3)])

    assert type(codecs_of_vectors(name, None)(flat, ["0.weight"])) is kind


def test_a_codec_of_the_scripts_own_is_taken_as_it_is():
    flat = FlatParameters([torch.ones(3)])

    assert type(codecs_of_vectors(OuterInt8, None)(flat, ["0.weight"])) is OuterInt8
