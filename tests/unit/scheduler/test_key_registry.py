"""Keys get numbers and places; ranks that mean different things by one key end the job."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import Owners
from netstorm.kvstore.forms import ChunkLayout, Key
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import FACTORS, ITEM_BYTES, QUANTISED, ROW_SPARSE, ChunkSizes
from netstorm.scheduler.rounds import KeyConflict, KeyRegistry
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import begun, key, running, star


def test_a_batch_of_keys_is_granted_at_once_and_round_0_may_begin():
    driven = running(2)
    driven.say(1, m.RegisterKeys(keys=(key("w", (3, 5)), key("b", (7,), "float64"))))
    (answer,) = driven.heard(1)
    assert [(one.name, one.key, one.offset) for one in answer.grants] == [("w", 0, 0), ("b", 1, 64)]
    assert answer.bindings == (m.Binding(0, 0, 1, 0), m.Binding(1, 0, 1, 0))


def test_all_ranks_get_the_same_numbers_whatever_their_order_and_one_name_in_two_stores_is_two_keys():
    driven = running(2)
    keys = [key("a"), key("b"), key("a", (3,), namespace=1)]
    driven.say(0, m.RegisterKeys(keys=tuple(keys)))
    driven.say(1, m.RegisterKeys(keys=tuple(reversed(keys))))
    first, second = driven.heard(0)[0].grants, driven.heard(1)[0].grants
    assert [one.key for one in first] == [0, 1, 2]
    assert first == tuple(reversed(second))


def test_a_key_that_is_registered_late_comes_with_every_binding_that_others_got():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(key("w"),)))
    driven.say(0, m.TopologyRequest(begun=(begun(0, 0),)))
    driven.install(star(2, version=2))
    driven.say(0, m.TopologyRequest(begun=(begun(0, 1),)))
    driven.say(1, m.RegisterKeys(keys=(key("w"),)))
    (answer,) = driven.heard(1, m.KeysRegistered)
    assert answer.bindings == (m.Binding(0, 0, 1, 2), m.Binding(0, 2, 2, 2))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (key("fc1_weight", (10, 21)), "(10, 21) float32, rank 0 as (10, 20) float32"),
        (key("fc1_weight", (10, 20), "float16"), "(10, 20) float16, rank 0 as (10, 20) float32"),
    ],
)
def test_a_shape_or_type_that_differs_ends_the_job_for_everybody_and_names_both(other, text):
    driven = running(4)
    driven.say(0, m.RegisterKeys(keys=(key("fc1_weight"),)))
    driven.say(3, m.RegisterKeys(keys=(other,)))
    for rank in range(4):
        gone = driven.gone(rank)
        assert (gone.rank, gone.kind) == (-1, "key")
        assert gone.reason == (
            f"rank 3 has fc1_weight as {text}: every rank must give a key the same shape and type"
        )
    assert driven.machine.phase is JobPhase.FAILED


def test_a_conflict_in_another_store_names_the_store():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(key("0", namespace=2),)))
    driven.say(1, m.RegisterKeys(keys=(key("0", (), namespace=2),)))
    assert "rank 1 has 0 (of store 2) as () float32" in driven.gone(0).reason


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (key("k", dtype="complex64"), "registers 'k'"),
        (key("k", (2, -1)), "registers 'k'"),
        (key("k", (2**40, 2**40)), "registers 'k'"),
        (key("k", (1,) * 65), "registers 'k'"),
        (key("k", dtype=""), "registers 'k'"),
        (m.KeySpec(0, "k", (3, 499), "float32", ROW_SPARSE), "rows of 499 elements, too long"),
        (key("w" * 1_000_000), "a name of 1000000 characters: expected at most"),
    ],
    ids=range(7),
)
def test_a_key_that_no_correct_node_sends_is_a_violation_and_leaves_no_trace(spec, problem):
    registry = KeyRegistry(ChunkSizes(100, 100, 32, 500))
    with pytest.raises(ProtocolViolation, match=f"rank 5 .*{problem}"):
        registry.register(5, spec)
    assert (len(registry), registry.total_bytes) == (0, 0)
    registry.register(0, key("none", (0, 5)))
    assert registry.total_bytes == 0, "an empty key takes no bytes"


shapes = st.lists(st.integers(0, 50), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=20), st.integers(1, 100))
def test_keys_are_aligned_do_not_overlap_and_waste_less_than_a_value_each(kinds, chunk_size):
    registry = KeyRegistry(ChunkSizes(chunk_size, chunk_size, 32))
    end = 0
    for index, (shape, dtype) in enumerate(kinds):
        grant = granted(registry, key(f"k{index}", shape, dtype))
        assert grant.offset % ITEM_BYTES[dtype] == 0
        assert 0 <= grant.offset - end < ITEM_BYTES[dtype]
        assert grant.first_slot == grant.offset // (chunk_size * 4)
        end = grant.offset + math.prod(shape) * ITEM_BYTES[dtype]
    assert registry.total_bytes == end


def test_keys_of_a_small_model_have_one_root_and_are_spread_over_owners():
    """GeoMX's network on digits, 61 KB, which fits into one chunk."""
    shapes = [(6, 1, 3, 3), (6,), (16, 6, 3, 3), (16,), (120, 64), (120,), (84, 120), (84,), (10, 84), (10,)]
    registry, keys = KeyRegistry(ChunkSizes(262_144, 524_288, 256)), []
    for index, shape in enumerate(shapes):
        made = Key(0, f"k{index}", shape, "float32")
        made.set_grant(granted(registry, key(f"k{index}", shape)))
        keys.append(made)
    assert {made.layout.slots[0] for made in keys if made.layout} == {0}
    owners = Owners((1, 1, 1, 1))
    assert Counter(owners.owner(made, 0) for made in keys) == {0: 3, 1: 3, 2: 2, 3: 2}


def test_chunks_of_large_keys_grow_where_they_may():
    registry = KeyRegistry(ChunkSizes(100, 1000, 32))
    sizes = {}
    for elements in (1, 3_200, 3_201, 16_000, 32_000, 10**6):
        grant = granted(registry, key(f"of {elements}", (elements,)))
        sizes[elements] = grant.chunk_size
    assert sizes == {1: 100, 3_200: 100, 3_201: 101, 16_000: 500, 32_000: 1000, 10**6: 1000}


def rows_key(name, shape, dtype="float32"):
    return m.KeySpec(namespace=0, name=name, shape=shape, dtype=dtype, form=ROW_SPARSE)


def granted(registry, spec):
    grant = registry.register(0, spec)
    assert isinstance(grant, m.KeyGrant)
    return grant


@given(
    st.integers(0, 10**6),
    st.integers(1, 3000),
    st.sampled_from(["float16", "float32", "float64"]),
    st.integers(1, 100_000),
)
def test_chunks_of_a_row_sparse_key_are_few_and_of_whole_rows_which_fit_into_a_message(
    rows, length, dtype, chunk_size
):
    most = 8192
    registry = KeyRegistry(ChunkSizes(chunk_size, 2 * chunk_size, 256, most))
    grant = granted(registry, rows_key("embedding", (rows, length), dtype))
    whole = grant.chunk_size // length
    assert whole >= 1
    assert grant.chunk_size == whole * length
    assert whole * (length * ITEM_BYTES[dtype] + 4) <= most * 8
    full = whole == most // (length + 2)
    assert full or -(-rows // whole) <= 32


@pytest.mark.parametrize(
    ("elements", "chunk_size"), [(0, 1024), (1000, 1024), (4000, 1024), (40_000, 5000), (10**6, 32_768)]
)
def test_a_small_key_of_factors_has_up_to_eight_chunks_of_4_kib_or_more(elements, chunk_size):
    registry = KeyRegistry(ChunkSizes(32_768, 65_536, 256))
    assert granted(registry, factors("w/scales", elements)).chunk_size == chunk_size


def test_factors_take_slots_by_their_own_bytes_also_after_a_restart():
    registry, restored = (KeyRegistry(ChunkSizes(32_768, 65_536, 256)) for _ in range(2))
    specs = [
        *[key("w", (10**6,)), factors("w/left", 1024), factors("w/right", 512), key("v", (10**6,))],
        *[factors("v/left", 512), factors("v/right", 4096)],
    ]
    slots = {}
    for spec in specs:
        grant = granted(registry, spec)
        restored.restore(0, spec, grant)
        slots[spec.name] = grant.first_slot
    assert [slots[name] for name in ("w/left", "w/right", "v/left", "v/right")] == [0, 1, 1, 2]
    assert registry.register(0, factors("last", 1)) == restored.register(0, factors("last", 1))


def factors(name, elements):
    return m.KeySpec(namespace=0, name=name, shape=(elements,), dtype="float32", form=FACTORS)


def test_a_row_sparse_key_counts_little_among_the_jobs_bytes_and_other_keys_come_after_it():
    registry = KeyRegistry(ChunkSizes(32_768, 65_536, 256))
    first = granted(registry, rows_key("embedding", (10**6, 128)))
    layout = ChunkLayout.of_key(128 * 10**6, 4, first, ROW_SPARSE)
    assert registry.sizes == (layout.chunks * 32_768,)
    second = granted(registry, key("dense", (10,)))
    assert max(layout.offsets) < second.offset


@pytest.mark.parametrize(
    ("form", "called"), [(ROW_SPARSE, " row_sparse"), (QUANTISED, " under gradient compression")]
)
def test_a_key_has_one_form_on_all_ranks(form, called):
    registry = KeyRegistry(ChunkSizes(100, 100, 32))
    registry.register(0, key("k", (3, 2)))
    conflict = registry.register(1, m.KeySpec(0, "k", (3, 2), "float32", form))
    assert isinstance(conflict, KeyConflict)
    assert f"rank 1 has k as (3, 2) float32{called}, rank 0 as (3, 2) float32" in str(conflict)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0, QUANTISED])), min_size=1, max_size=6),
    st.integers(1, 100_000),
)
def test_quantised_keys_have_larger_chunks_of_whole_bytes_and_a_place_of_their_own(sizes, chunk_size):
    registry = KeyRegistry(ChunkSizes(chunk_size, 2 * chunk_size, 256))
    end = 0
    for name, (elements, form) in enumerate(sizes):
        grant = granted(registry, m.KeySpec(0, str(name), (elements,), "float32", form))
        layout = ChunkLayout.of_key(elements, 4, grant, form)
        assert grant.offset >= end
        assert layout.offsets == sorted(set(layout.offsets))
        end = max([grant.offset, *layout.offsets]) + (elements > 0)
        assert registry.total_bytes >= end
        if form == QUANTISED:
            assert grant.chunk_size % 8 == 0
            assert grant.chunk_size >= 4 * chunk_size - 7 or grant.chunk_size == 2**20


def test_a_quantised_key_counts_an_8th_of_its_bytes_in_the_job():
    registry = KeyRegistry(ChunkSizes(65_536, 65_536, 256))
    registry.register(0, m.KeySpec(0, "k", (2**22,), "float32", QUANTISED))
    assert registry.sizes == (2**21,)
    assert registry.chunk_bytes == 2**17


def test_there_is_an_end_to_the_keys_that_a_member_can_register(monkeypatch):
    monkeypatch.setattr("netstorm.scheduler.rounds.MOST_KEYS", 2)
    registry = KeyRegistry(ChunkSizes(smallest=64, largest=64, enough=4))
    for name in ("a", "b", "a"):
        registry.register(0, m.KeySpec(namespace=0, name=name, shape=(3,), dtype="float32"))
    with pytest.raises(ProtocolViolation, match="registers key number 2"):
        registry.register(0, m.KeySpec(namespace=0, name="c", shape=(3,), dtype="float32"))


def test_keys_by_name_have_their_trees_whoever_registers_them_first():
    names = ["w", "b", "group 1/small", "group 2/small"]
    slots = []
    for order in (names, names[::-1]):
        registry = KeyRegistry(ChunkSizes(10, 10, 32), by_name=True)
        for name in order:
            registry.register(0, key(name, (100,)))
        slots.append(
            {registry.name(number): registry.grant(number).first_slot for number in range(len(order))}
        )
    assert slots[0] == slots[1]
    assert len(set(slots[0].values())) == len(names)
