from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.units import (
    format_bytes,
    format_duration,
    format_fraction,
    format_rate,
    parse_bytes,
    parse_duration,
    parse_fraction,
    parse_rate,
)

PARSERS = (parse_rate, parse_bytes, parse_duration, parse_fraction)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "100Mbit", 100e6),
        (parse_rate, "2.5Gbit", 2.5e9),
        (parse_rate, " 64 kbit/s ", 64e3),
        (parse_rate, "0bit", 0),
        (parse_bytes, "16MB", 16_000_000),
        (parse_bytes, "16MiB", 16 * 2**20),
        (parse_bytes, "1.5kB", 1500),
        (parse_bytes, "7B", 7),
        (parse_duration, "15ms", 0.015),
        (parse_duration, "3min", 180),
        (parse_duration, "180s", 180),
        (parse_duration, "500us", 0.0005),
        (parse_duration, "1e2ns", 1e-7),
        (parse_fraction, "0.02%", 0.0002),
        (parse_fraction, "100%", 1),
    ],
)
def test_a_number_with_its_unit_is_exact(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("bare", ["100", "0", 100, 0, 1.5])
def test_a_bare_number_is_refused_and_the_units_are_named(parse, bare):
    unit = {parse_rate: "Mbit", parse_bytes: "MiB", parse_duration: "ms", parse_fraction: "%"}[parse]
    with pytest.raises(UsageError, match=f"has no unit.*{unit}"):
        parse(bare)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "fast",
        "nan",
        "inf",
        "nan%",
        "infs",
        "1_000B",
        "٣s",
        "1.2.3s",
        "--1s",
        None,
        True,
        [],
        float("nan"),
    ],
)
def test_what_is_no_number_is_refused(parse, nonsense):
    with pytest.raises(UsageError, match="expected"):
        parse(nonsense)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_rate, "-1Mbit"), (parse_bytes, "-1B"), (parse_duration, "-1s"), (parse_fraction, "-1%")],
)
def test_a_negative_quantity_is_refused(parse, text):
    with pytest.raises(UsageError, match="negative"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (parse_rate, "5mbit", "Mbit"),
        (parse_bytes, "5mb", "MB"),
        (parse_duration, "5S", "s"),
        (parse_rate, "5GBIT", "Gbit"),
    ],
)
def test_a_unit_in_the_wrong_case_is_refused_with_the_right_one(parse, text, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        parse(text)


def test_bytes_are_no_rate_and_bits_are_no_size():
    with pytest.raises(
        UsageError, match="'MB' is not a unit of a rate: expected a number and one of bit, kbit, Mbit"
    ):
        parse_rate("5MB")
    with pytest.raises(UsageError, match="'Mbit' is not a unit of a size"):
        parse_bytes("5Mbit")


def test_a_size_is_a_whole_number_of_bytes():
    with pytest.raises(UsageError, match="not a whole number"):
        parse_bytes("1.0001kB")


def test_a_huge_exponent_is_refused_at_once():
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes("1e999999999B")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_rate(100e6), "100Mbit/s"),
        (format_rate(2.5e9), "2.5Gbit/s"),
        (format_rate(0), "0bit/s"),
        (format_bytes(64 * 2**20), "64MiB"),
        (format_bytes(244_000_000), "244MB"),
        (format_bytes(0), "0B"),
        (format_duration(0.015), "15ms"),
        (format_duration(180), "3min"),
        (format_duration(0), "0s"),
        (format_fraction(0.0002), "0.02%"),
    ],
)
def test_quantities_are_written_as_people_write_them(text, expected):
    assert text == expected


@pytest.mark.parametrize("write", [format_rate, format_duration, format_fraction])
@pytest.mark.parametrize("quantity", [-1, float("nan"), float("inf")])
def test_what_is_no_quantity_is_not_written(write, quantity):
    with pytest.raises(ValueError, match="must be at least 0"):
        write(quantity)


@given(st.floats(min_value=1e-9, max_value=1e17))
def test_what_is_written_reads_back_to_four_digits(quantity):
    for write, parse in (
        (format_rate, parse_rate),
        (format_duration, parse_duration),
        (format_fraction, parse_fraction),
    ):
        assert parse(write(quantity)) == pytest.approx(quantity, rel=1e-3)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_written_size_reads_back_to_four_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=1e-3)


@given(st.text())
def test_no_text_does_anything_but_parse_or_be_refused(text):
    for parse in PARSERS:
        try:
            assert parse(text) >= 0
        except UsageError as error:
            assert repr(text) in str(error)
