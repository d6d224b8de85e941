"""Three ranks call with arrays of any type, shape and layout: results are NumPy's own, bit for bit."""

from __future__ import annotations

import re

from tests.integration.docs.pages import blocks
from tests.integration.jobs import run_job

RANDOM_CALLS = """
import functools

import numpy as np

import netstorm

UFUNCS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
TYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64",
         "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"]


def drawn(chance, dtype, shape, layout):
    # Small whole numbers: their sums and products are exact in any order, in float16, too.
    values = chance.integers(0, 4, shape)
    array = np.array(values + 1j * values if dtype.startswith("complex") else values, dtype)
    if layout == "fortran":
        return np.array(array, order="F")
    if layout == "big-endian":
        return array.astype(array.dtype.newbyteorder(">"))
    if layout == "strided" and array.ndim:
        whole = np.zeros((2 * array.shape[0], *array.shape[1:]), array.dtype)
        whole[::2] = array
        return whole[::2]
    if layout == "read-only":
        array.flags.writeable = False
    return array


def expected(op, arrays):
    if op == "mean":
        exact = [a.astype(np.float64) if a.dtype.kind in "biu" else a for a in arrays]
        wide = [a.astype(np.float32) if a.dtype == np.float16 else a for a in exact]
        total = functools.reduce(np.add, wide)
        reals = np.atleast_1d(total).view(total.real.dtype)  # of complex numbers, two each
        mean = (reals / reals.dtype.type(len(arrays))).view(total.dtype).reshape(total.shape)
        return mean.astype(exact[0].dtype.newbyteorder("="))
    native = [a.astype(a.dtype.newbyteorder("=")) for a in arrays]
    return functools.reduce(UFUNCS[op], native)


with netstorm.Group() as group:
    chance = np.random.default_rng(2404_11352)
    for case in range(200):
        dtype = str(chance.choice(TYPES))
        linear = dtype.startswith("complex")
        op = str(chance.choice(["sum", "mean"] if linear else [*UFUNCS, "mean"]))
        shape = tuple(chance.integers(0, 5, chance.integers(0, 4)).tolist())
        layouts = ["plain", "fortran", "strided", "read-only", "big-endian"]
        arrays = [drawn(chance, dtype, shape, str(chance.choice(layouts))) for _ in range(group.size)]
        mine, wanted = arrays[group.rank], expected(op, arrays)
        before = mine.copy()
        how = str(chance.choice(["new", "out", "columns", "in place"]))
        out = None
        if how == "out":
            out = np.empty(shape, wanted.dtype)
        elif how == "columns":
            out = np.empty(shape, wanted.dtype, order="F")
        elif how == "in place" and mine.flags.writeable and mine.dtype == wanted.dtype:
            out = mine
        got = group.allreduce(mine, op, out=out)
        name = (case, dtype, op, shape, how)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, name
        assert np.array_equal(got, wanted), (name, got, wanted)
        assert out is None or got is out, name
        assert out is mine or np.array_equal(mine, before), name
    print("all are right")
"""


def test_reductions_of_any_array_are_those_of_numpy(tmp_path):
    for ended in run_job(tmp_path, 3, RANDOM_CALLS):
        assert (ended.code, ended.out) == (0, "all are right\n"), ended.text


LARGE = """
import numpy as np

import netstorm

with netstorm.Group() as group:
    chance = np.random.default_rng(7)
    arrays = [chance.standard_normal((3, 500_001)) for _ in range(group.size)]
    total = group.allreduce(arrays[group.rank])
    assert np.allclose(total, sum(arrays), rtol=1e-12, atol=1e-12)
    every = group.allgather(total)
    assert (every == total).all()  # the same bits at all ranks
    print("equal")
    raise SystemExit  # an orderly end
"""


def test_large_sums_are_right_and_have_the_same_bits_at_all_ranks(tmp_path):
    for ended in run_job(tmp_path, 3, LARGE):
        assert (ended.code, ended.out) == (0, "equal\n"), ended.text


COPIES = """
import asyncio

import numpy as np

import netstorm

with netstorm.Group() as group:
    rank, size = group.rank, group.size
    assert (size, group.members, group.is_newcomer) == (3, (0, 1, 2), False)
    mine = np.array([[rank, 10 * rank]], np.int16)

    for root in range(size):
        copy = group.broadcast(mine, root)
        assert copy.tolist() == [[root, 10 * root]] and copy is not mine
        gathered = group.gather(mine, root)
        if rank == root:
            assert gathered.shape == (3, 1, 2) and gathered[:, 0, 1].tolist() == [0, 10, 20]
        else:
            assert gathered is None
        row = group.scatter(np.arange(6.0).reshape(3, 2) + 100 * rank, root)
        assert row.tolist() == [2 * rank + 100 * root, 2 * rank + 1 + 100 * root]
        least = group.reduce(mine, root, "max")
        assert (least is None) == (rank != root)
        assert least is None or least.tolist() == [[2, 20]]
    assert group.allgather(mine)[:, 0, 0].tolist() == [0, 1, 2]
    assert mine.tolist() == [[rank, 10 * rank]]

    # What is only copied may be of any type of fixed size.
    when = group.broadcast(np.array([f"202{rank}-01-01"], "datetime64[D]"), 2)
    assert when.astype(str).tolist() == ["2022-01-01"]
    records = group.allgather(np.array([(rank, b"ab")], [("number", "i4"), ("text", "S2")]))
    assert records["number"][:, 0].tolist() == [0, 1, 2]

    # Trees: dictionaries may have been filled in any order.
    pairs = [("weights", np.full(3, rank)), ("bias", [np.float32(rank), (rank, rank + 1)])]
    tree = dict(pairs if rank else reversed(pairs))
    total = group.allreduce(tree)
    assert list(total) == list(tree) and total["weights"].tolist() == [3, 3, 3]
    assert total["bias"][0] == 3 and total["bias"][1] == (3, 6)
    assert group.broadcast(tree, 1)["bias"][1] == (1, 2)
    assert group.allreduce({}) == {} and group.allreduce([]) == []
    into = {"a": np.empty(2), "b": np.empty(1)}
    found = group.allreduce({"a": np.ones(2), "b": np.ones(1)}, out=into)
    assert found["a"] is into["a"] and into["a"].tolist() == [3, 3]

    # Messages arrive in their order.
    if rank == 0:
        group.send(np.arange(3), 1)
        futures = [group.send_async(np.full(300_000, place), 1, tag=5) for place in range(2)]
        [future.result() for future in futures]
    elif rank == 1:
        later = group.recv_async(np.empty(300_000, np.int64), 0, tag=5)
        assert group.recv(np.empty(3, np.int64), 0).tolist() == [0, 1, 2]
        assert (later.result() == 0).all()
        assert (group.recv(np.empty(300_000, np.int64), 0, tag=5) == 1).all()
    group.barrier()

    async def main():
        futures = [group.allreduce_async(np.full(50_000, place)) for place in range(8)]
        totals = await asyncio.gather(*futures)
        assert [int(total[-1]) for total in totals] == [3 * place for place in range(8)]
        assert futures[0].contributors == {0, 1, 2} and futures[0].done()
        late = group.barrier_async()
        if rank == 0:
            for other in (1, 2):  # nobody has a sum before both have given up waiting for it
                await group.recv_async(np.empty(1), other)
        else:
            try:
                await asyncio.wait_for(group.allreduce_async(rank), 0.01)
            except (TimeoutError, asyncio.TimeoutError):
                print("went on")  # the call goes on, too
            await group.send_async(np.ones(1), 0)
        await late
        if rank == 0:
            await group.allreduce_async(rank)
        return await group.allreduce_async(1.5)

    assert asyncio.run(main()) == 4.5
    with netstorm.Group() as other:  # another sequence of calls in the same job
        assert other.allreduce(1) == 3
    assert group.allreduce(1) == 3
print("done")
"""


def test_copies_trees_messages_and_coroutines(tmp_path):
    ended = run_job(tmp_path, 3, COPIES)
    for each in ended:
        assert each.code == 0, each.text
        assert each.out.endswith("done\n"), each.text
    assert [each.out.count("went on") for each in ended] == [0, 1, 1]


STATISTICS = """
import numpy as np

sites = [np.random.default_rng(site).normal(3 + site, 2, (100 * site + 1, 4)) for site in range(3)]
{block}
pooled = np.concatenate(sites)
assert np.allclose(mean, pooled.mean(axis=0))
assert np.allclose(variance, pooled.var(axis=0, ddof=1))
print("as of all rows")
"""


def test_the_page_s_statistics_over_sites_are_those_of_all_rows(tmp_path):
    (block,) = [block.text for block in blocks("python") if "variance" in block.text]
    own = re.sub(
        r"^rows = .*$", "import os; rows = sites[int(os.environ['NETSTORM_RANK'])]", block, flags=re.MULTILINE
    )
    for ended in run_job(tmp_path, 3, STATISTICS.format(block=own)):
        assert (ended.code, ended.out) == (0, "as of all rows\n"), ended.text


TWO_JOBS = """
import netstorm

for job in ("first", "second"):
    with netstorm.Group(job=job, timeout=60) as group:
        assert group.allreduce(group.rank) == 1
        try:
            netstorm.Group(rank=1)
        except netstorm.UsageError as error:
            print(error)
try:
    group.allreduce(1)
except netstorm.UsageError as error:
    print(error)
"""


def test_a_program_may_join_one_job_after_the_other_and_arguments_win(tmp_path):
    for rank, ended in enumerate(run_job(tmp_path, 2, TWO_JOBS, NETSTORM_JOBS=0)):
        assert ended.code == 0, ended.text
        assert ended.out.count(f"this process is in a job already, as rank {rank}") == 2
        assert "this group has been closed" in ended.out
