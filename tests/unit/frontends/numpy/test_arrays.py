from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from netstorm.errors import UsageError
from netstorm.frontends.numpy.arrays import (
    Target,
    describe,
    element_of,
    flat,
    leaves,
    ready_to_read,
    reduction_of,
    with_leaves,
)
from netstorm.protocol.codecs import Element, Reduction

TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


class Pair(NamedTuple):
    first: int
    second: int


@given(TREES)
def test_a_tree_is_made_of_its_own_leaves_again(tree):
    found = list(leaves(tree))
    assert len({path for path, _ in found}) == len(found)
    assert with_leaves(tree, iter([value for _, value in found])) == tree


def test_dictionaries_are_gone_through_by_key_and_keep_their_order():
    one, other = {"b": 1, "a": [2, (3,)]}, {"a": [2, (3,)], "b": 1}
    assert list(leaves(one)) == list(leaves(other))
    assert list(with_leaves(one, iter("xyz"))) == ["b", "a"]
    assert with_leaves(Pair(1, 2), iter([3, 4])) == Pair(3, 4)


@given(arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)))
def test_what_is_ready_to_read_has_the_values_and_only_other_layouts_are_copied(array):
    ready = ready_to_read(array, "call")
    assert (ready.shape, ready.dtype.isnative, ready.flags.c_contiguous) == (array.shape, True, True)
    np.testing.assert_array_equal(ready, array)
    if array.dtype.isnative and array.size:
        assert np.shares_memory(ready, array)
        assert np.shares_memory(flat(ready), array)
    assert flat(ready).tobytes() == ready.tobytes()
    turned = ready_to_read(array.T, "call")
    np.testing.assert_array_equal(turned, array.T)
    assert turned.flags.c_contiguous


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "call: an array of Python objects (NoneType)"),
        (np.array([{}, 1], object), "expected numbers; nothing is pickled here"),
        (np.ma.masked_equal([1, 2], 2), "call: a masked array, whose mask would be lost"),
    ],
)
def test_what_is_no_plain_array_is_refused(value, text):
    with pytest.raises(UsageError) as raised:
        ready_to_read(value, "call")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("dtype", "op", "element"),
    [
        ("float32", "sum", Element.FLOAT32),
        ("float16", "mean", Element.FLOAT16),
        ("bool", "max", Element.BOOL),
        ("uint64", "product", Element.UINT64),
        ("complex128", "mean", Element.FLOAT64),
    ],
)
def test_types_have_elements(dtype, op, element):
    assert element_of(np.dtype(dtype), reduction_of(op), "call") is element


@pytest.mark.parametrize(
    ("dtype", "op"), [("complex64", "max"), ("complex64", "product"), ("datetime64[s]", "sum"), ("U3", "max")]
)
def test_a_type_that_cannot_be_reduced_so_is_refused(dtype, op):
    with pytest.raises(UsageError, match=r"^call: elements of type .* have no .*: expected whole numbers"):
        element_of(np.dtype(dtype), reduction_of(op), "call")


def test_bfloat16_is_reduced_as_such():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes, which has bfloat16, is not installed")
    array = ready_to_read(np.arange(3).astype(ml_dtypes.bfloat16), "call")
    assert element_of(array.dtype, Reduction.SUM, "call") is Element.BFLOAT16
    assert flat(array, Element.BFLOAT16).dtype == np.uint16
    assert describe(array) == "bfloat16 (3,)"


@pytest.mark.parametrize("op", ["avg", "SUM", "", None, np.add, [1]])
def test_a_reduction_that_there_is_not_is_refused_with_those_that_there_are(op):
    with pytest.raises(UsageError, match="expected one of 'sum', 'mean', 'product', 'min', 'max'"):
        reduction_of(op)


def test_equal_descriptions_mean_equal_types_and_shapes():
    dtypes: list[Any] = ["f4", "f8", "i4", "S4", "S5", [("a", "i4")], [("b", "i4")], "M8[s]", "M8[D]"]
    texts = [describe(np.zeros(shape, dtype)) for shape in [(), (1,), (2, 3), (6,)] for dtype in dtypes]
    assert len(set(texts)) == len(texts)
    assert texts[0] == "float32 ()"


def test_a_result_is_written_to_the_user_s_memory_if_the_node_can_use_it():
    source = np.zeros((3, 4), np.float32)
    for out, is_memory in (
        (np.empty((3, 4), np.float32), True),
        (source, True),  # in place
        (np.empty((4, 3), np.float32).T, False),
        (np.empty((6, 4), np.float32)[::2], False),
        (np.zeros(24, np.float32)[6:18].reshape(3, 4), True),
    ):
        target = Target((3, 4), np.dtype("f4"), out, source, "call")
        assert (target.memory is out) is is_memory
        target.memory[:] = 7
        assert target.result() is out
        assert (out == 7).all()


def test_a_result_never_overwrites_a_part_of_what_is_being_read():
    whole = np.arange(6.0)
    target = Target((5,), whole.dtype, whole[1:], whole[:5], "call")
    target.memory[:] = 9
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    target.result()
    assert whole.tolist() == [0, 9, 9, 9, 9, 9]


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ([0.0, 0.0], "call: out is a list: expected an array of NumPy's"),
        (np.zeros(3), "call: out is float64 (3,): expected float64 (2,), as the result has"),
        (np.zeros(2, np.float32), "call: out is float32 (2,): expected float64 (2,), as the result has"),
        (np.broadcast_to(0.0, 2), "call: out cannot be written: it is read-only"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out, text):
    with pytest.raises(UsageError) as raised:
        Target((2,), np.dtype(float), out, np.zeros(2), "call")
    assert str(raised.value) == text
