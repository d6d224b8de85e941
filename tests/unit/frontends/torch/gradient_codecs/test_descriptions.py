"""Codecs as a setting describes them."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError

pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.gradient_codecs import described_codec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", "int8"),
        (" topk ", "topk"),
        ('{"type": "topk", "ratio": 0.02}', {"type": "topk", "ratio": 0.02}),
        ('{"*.bias": "none", "*": {"type": "powersgd"}}', {"*.bias": "none", "*": {"type": "powersgd"}}),
    ],
)
def test_a_codec_is_a_name_or_json(text, expected):
    assert described_codec(text, "CODEC") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int4", "CODEC='int4': codec 'int4': expected one of auto, none"),
        ('{"type": "topk", "ratio": 3}', "topk with ratio=3"),
        ('{"type": "int8", "bits": 4}', "bits=4: it takes rounding"),
        ('{"*": 3}', "3 is no codec: expected a name, or its type and parameters"),
        ('{"*": "int8", "*": "none"}', "CODEC: '.' is there twice"),
        ("{int8}", "is not JSON"),
        ("{}", "no codec: expected a name"),
    ],
)
def test_anything_else_is_refused_with_its_reason(text, reason):
    with pytest.raises(UsageError, match=reason):
        described_codec(text, "CODEC")
