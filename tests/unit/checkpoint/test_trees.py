"""Trees of plain values and tensors, and their encoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.checkpoint.format import flatten, unflatten
from netstorm.errors import CheckpointError, UsageError


class Tensor:
    """Stands for a framework's."""


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(Tensor)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1), inner)
    ),
    max_leaves=20,
)


def types(value: object) -> object:
    """Return the types in a tree: True and 1 are equal, and so are 1 and 1.0."""
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [types(item) for item in value]
    return type(value)


@given(trees)
def test_a_tree_comes_back_with_its_values_types_and_tensors(tree):
    values, tensors = flatten(tree, is_tensor, taken={"0"})
    found = unflatten(values, list(tensors.values()))
    assert found == tree
    assert types(found) == types(tree)
    assert not {"0", "__metadata__"} & set(tensors)


@given(trees, st.data())
def test_damaged_bytes_are_an_error_of_ours_or_another_tree(tree, data):
    values, tensors = flatten(tree, is_tensor)
    place = data.draw(st.integers(0, len(values) - 1))
    damaged = bytearray(values)
    damaged[place] ^= data.draw(st.integers(1, 255))
    try:
        unflatten(bytes(damaged), list(tensors.values()))
    except CheckpointError as error:
        assert "make no sense" in str(error)


def test_tensors_are_named_by_their_place():
    tree = {"model": {"0.weight": Tensor()}, "state": {0: [1, (Tensor(),)]}}
    assert list(flatten(tree, is_tensor)[1]) == ["model.0.weight", "state.0.1.0"]
    assert next(iter(flatten(tree, is_tensor, prefix="own.3.")[1])) == "own.3.model.0.weight"


def test_no_two_tensors_have_the_same_name():
    tree = {"a.b": Tensor(), "a": {"b": Tensor(), 0: Tensor(), "0": Tensor()}, "__metadata__": Tensor()}
    values, tensors = flatten(tree, is_tensor, taken={"a.0"})
    assert list(tensors) == ["a.b", "a.b~", "a.0~", "a.0~~", "__metadata__~"]
    assert unflatten(values, list(tensors.values())) == tree


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"loader": {"sampler": object()}}, r"loader\.sampler is a builtins\.object.*state_dict"),
        ({"a": {1.5: 2}}, r"a has the key 1\.5 of type float"),
        ({"a": {True: 2}}, r"a has the key True of type bool"),
        ({"a": {2**64: 2}}, "keys must be str or int"),
        ({"a": {1, 2}}, r"a is a builtins\.set"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(value, said):
    with pytest.raises(UsageError, match=said):
        flatten(value, is_tensor)


def test_a_tree_that_contains_itself_is_refused():
    tree: dict[str, object] = {}
    tree["again"] = tree
    with pytest.raises(UsageError, match="contains itself"):
        flatten(tree, is_tensor)
