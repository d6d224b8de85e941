"""Which parameters of a tensor travel together."""

from __future__ import annotations

import pytest

from netstorm.compression.registry import rules_of
from netstorm.errors import UsageError
from netstorm.training.codec_states import Parameter, units_of

BIG, SMALL, BIAS = (
    Parameter("big.weight", (300, 200)),
    Parameter("a.weight", (10, 20)),
    Parameter("a.bias", (10,)),
)


def described(codec, *parameters):
    return [
        (unit.codec and unit.codec.name, [parameter.name for parameter in unit.parameters], unit.shape)
        for unit in units_of(parameters, rules_of(codec))
    ]


def test_small_parameters_with_one_codec_are_one_unit_by_name_and_large_ones_are_by_themselves():
    assert described("int8", SMALL, BIG, BIAS) == [
        ("int8", ["a.bias", "a.weight"], (210,)),
        ("int8", ["big.weight"], (300, 200)),
    ]


def test_the_order_of_a_bucket_makes_no_other_units():
    first, second = (units_of(order, rules_of("int8")) for order in ([SMALL, BIAS], [BIAS, SMALL]))
    assert [unit.name for unit in first] == [unit.name for unit in second]
    assert [unit.parameters for unit in first] == [unit.parameters for unit in second]
    assert [unit.places for unit in first] != [unit.places for unit in second]


def test_places_are_where_the_values_are():
    [unit] = units_of([SMALL, BIAS], rules_of("fp16"))
    assert unit.places == (slice(200, 210), slice(0, 200))


def test_what_has_no_codec_travels_together_however_large_it_is():
    rules = {"big.*": "none", "*.bias": "none", "*": "int8"}
    assert described(rules, BIG, SMALL, BIAS) == [
        (None, ["big.weight", "a.bias"], (60_010,)),
        ("int8", ["a.weight"], (10, 20)),
    ]


def test_powersgd_has_matrices_by_themselves_and_leaves_the_rest_as_it_is():
    matrix, other = Parameter("m", (60, 70)), Parameter("n", (60, 70))
    assert described("powersgd", BIAS, matrix, SMALL, other) == [
        (None, ["a.bias", "a.weight"], (210,)),
        ("powersgd", ["m"], (60, 70)),
        ("powersgd", ["n"], (60, 70)),
    ]


def test_mpq_goes_by_the_size_of_each_parameter():
    codec = {"type": "mpq", "size_lower_bound": 1000}
    assert described(codec, BIAS, BIG, SMALL) == [
        ("fp16", ["a.bias", "a.weight"], (210,)),
        ("mpq", ["big.weight"], (300, 200)),
    ]


def test_parameters_without_values_make_no_unit():
    assert described("int8", Parameter("empty", (0, 3))) == []
    assert described("int8", Parameter("scalar", ())) == [("int8", ["scalar"], ())]


def test_a_parameter_that_no_rule_is_for_is_refused_by_name():
    with pytest.raises(UsageError, match=r"no codec for 'a\.weight'"):
        units_of([SMALL], rules_of({"*.bias": "none"}))
