"""Descriptions of codecs: what users may write, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from netstorm.compression.registry import CODECS, codec_of, rules_of
from netstorm.errors import UsageError


@pytest.mark.parametrize("name", CODECS)
def test_every_name_is_a_codec_that_says_what_ranks_compare(name: str):
    assert codec_of(name).name == name
    assert codec_of({"type": name}).fingerprint == codec_of(name).fingerprint
    assert codec_of(name).fingerprint.startswith(name)


@pytest.mark.parametrize(
    ("description", "fingerprint"),
    [
        ({"type": "topk", "ratio": "0.1"}, "topk ratio=0.1 "),
        ({"type": "powersgd", "rank": "2"}, "powersgd rank=2"),
        ({"type": "powersgd", "rank": 2.0}, "powersgd rank=2"),
        ({"type": "bsc", "threshold": 0.5}, "bsc ratio=0.5 "),
        ({"type": "int8", "rounding": "stochastic"}, "int8 rounding=stochastic"),
        ({"type": "2bit", "threshold": "0.25"}, "2bit threshold=0.25"),
    ],
)
def test_numbers_may_be_text_and_names_geomxs(description: dict[str, Any], fingerprint: str):
    assert codec_of(description).fingerprint.startswith(fingerprint)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (
            {"type": "topk", "ratio": "much"},
            "codec 'topk' with {'ratio': 'much'}: expected a number such as 0.01",
        ),
        ({"type": "topk", "ratio": float("nan")}, "topk with ratio=nan: expected more than 0"),
        ({"type": "topk", "ratio": 2}, "topk with ratio=2: expected more than 0, up to 1"),
        ({"type": "topk", "warmup": -1}, "topk with warmup=-1: expected 0 or more"),
        ({"type": "powersgd", "rank": 1.5}, "{'rank': 1.5}: expected a whole number such as 4"),
        ({"type": "powersgd", "rank": True}, "{'rank': True}: expected a whole number"),
        ({"type": "powersgd", "rank": None}, "{'rank': None}: expected a whole number"),
        ({"type": "int8", "rounding": 3}, "{'rounding': 3}: expected text such as 'nearest'"),
        ({"type": "int8", "rounding": "up"}, "expected 'nearest' or 'stochastic'"),
        ({"type": "fp16", "ratio": 1}, "with ratio=1: it takes no parameters"),
        ({"type": "9bit"}, "codec '9bit': expected one of auto, none, fp16"),
        ({"*": {"ratio": 0.1}}, "expected a 'type', which is one of auto"),
        ({"*": 3}, "codec 3: expected a name, or a mapping"),
        ({}, "expected a name, or a pattern"),
        (3, "codec 3: expected a name"),
    ],
)
def test_what_cannot_be_is_named_with_what_was_expected(description: Any, words: str):
    with pytest.raises(UsageError) as error:
        rules_of(description)
    assert words in str(error.value)


def test_the_first_pattern_that_matches_counts():
    rules = rules_of({"*.bias": "none", "head*": {"type": "powersgd", "rank": 2}, "*": "int8"})
    assert [rules.of(name).name for name in ("a.bias", "head.bias", "head.weight", "a.weight")] == [
        "none",
        "none",
        "powersgd",
        "int8",
    ]
    with pytest.raises(UsageError, match=r"no codec for 'b': its name matches none of 'a'"):
        rules_of({"a": "int8"}).of("b")
