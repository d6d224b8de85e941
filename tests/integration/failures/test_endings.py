"""Scripts that end early, badly, or long before the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.failures.scripts import (
    PLAIN_WAIT_FOR_THE_END,
    SHORT_TIMEOUTS,
    assert_tidy,
    start,
    start_plain,
)
from tests.integration.jobs import Ended, Job


class Plain(str):
    """A script that does without MXNet."""

    __slots__ = ()


def ends(folder: Path, *scripts: str, **settings: object) -> list[Ended]:
    """Run one script a rank, and return how they ended."""
    quiet = {"NETSTORM_LOG": "error"}  # no word on who has not come yet
    with Job(folder, len(scripts), **SHORT_TIMEOUTS, **quiet, **settings) as job:
        for rank, script in enumerate(scripts):
            (start_plain if isinstance(script, Plain) else start)(job, rank, script)
        return job.end_all(60)


def test_unequal_numbers_of_batches_are_an_error_that_names_both_ranks_and_the_rounds(tmp_path: Path) -> None:
    *longer, shorter = ends(tmp_path, "step(); step()", Plain("step(); step()"), Plain("step()"))
    for end in longer:
        assert end.code == 1
        assert "every rank must push every key equally often (the same number of batches)" in end.err
        assert "waits for round 3 of key 'k', but rank 2 (127.0.0.1:" in end.err
        assert "has finished after round 2" in end.err
        assert_tidy(end)
    assert any("netstorm.errors.UnevenRounds: rank " in end.err for end in longer)
    assert shorter.code == 1
    assert shorter.error_lines[0].startswith("netstorm: rank 2: NodeFailed: rank ")
    assert "UnevenRounds" in shorter.err
    assert_tidy(shorter)


def test_with_join_ranks_that_have_finished_contribute_zeros_until_all_have(tmp_path: Path) -> None:
    first = "step(); print(out.asnumpy().max())"
    steps = "for _ in range({}): step()\nprint(out.max())"
    last = steps.format(7) + "\nruntime.barrier()"  # which the others never come to
    ended = ends(tmp_path, first, Plain(steps.format(3)), Plain(last), NETSTORM_UNEVEN="join")
    assert [end.code for end in ended] == [0, 0, 0], ended
    assert [float(end.out) for end in ended] == [3, 2, 1]


def test_with_join_a_key_that_a_finished_rank_never_had_is_an_error_on_every_rank(tmp_path: Path) -> None:
    late = """
time.sleep(1)
kv.init("late", ones()); kv.push("late", ones())
kv.pull("late", out=out); out.wait_to_read()
"""
    *late_ones, finished = ends(tmp_path, late, late, Plain(), NETSTORM_UNEVEN="join")
    for end in late_ones:
        assert end.code == 1
        assert "has finished without ever using that key: a key must be initialised before any" in end.err
    assert finished.code == 1
    assert "UnevenRounds" in finished.err


def test_with_join_who_waits_at_a_barrier_does_not_wait_for_ranks_that_have_finished(tmp_path: Path) -> None:
    early = "kv._barrier(); kv._barrier(); step(); print(out.asnumpy().max())"
    ended = ends(
        tmp_path,
        early,
        Plain("time.sleep(1); runtime.barrier()"),
        Plain("time.sleep(2)"),
        NETSTORM_UNEVEN="join",
    )
    assert [(end.code, end.out) for end in ended] == [(0, "1.0\n"), (0, ""), (0, "")], ended


def test_with_join_the_others_may_push_now_a_dense_array_and_now_rows(tmp_path: Path) -> None:
    script = """
kv.init("e", mx.nd.zeros((6, 2)))
values = mx.nd.zeros((6, 2)); values[1] = 5
for step in range({}):
    kv.push("e", values if step % 3 else values.tostype("row_sparse"))
result = mx.nd.zeros((6, 2))
kv.pull("e", out=result)
print(result.asnumpy().tolist()[1])
"""
    ended = ends(tmp_path, *(script.format(steps) for steps in (2, 3, 7)), NETSTORM_UNEVEN="join")
    assert [end.code for end in ended] == [0, 0, 0], ended
    assert [end.out for end in ended] == ["[15.0, 15.0]\n", "[10.0, 10.0]\n", "[5.0, 5.0]\n"]


def test_a_rank_that_never_uses_a_key_of_the_others_is_named(tmp_path: Path) -> None:
    uses, does_not = ends(
        tmp_path, "kv.init('extra', ones()); kv.pull('extra', out=out); out.wait_to_read()", Plain()
    )
    assert uses.code == does_not.code == 1
    assert "rank 1 (127.0.0.1:" in uses.err
    assert "has finished without ever using that key" in uses.err
    assert_tidy(uses)


def test_an_exception_in_one_rank_reaches_all_others_with_its_text(tmp_path: Path) -> None:
    guilty, reads, waits = ends(
        tmp_path,
        Plain("raise ValueError('no such image')"),
        "step()",
        Plain("runtime.barrier()"),
    )
    assert guilty.code == 1
    assert guilty.err.endswith("ValueError: no such image\n")
    assert_tidy(guilty)
    for end in (reads, waits):
        assert end.code == 1
        assert "netstorm.errors.NodeFailed: rank 0 (127.0.0.1:" in end.err
        assert "failed: ValueError: no such image" in end.err
        assert_tidy(end)


def test_an_exit_code_is_announced_and_kept(tmp_path: Path) -> None:
    guilty, other = ends(tmp_path, "sys.exit(3)", Plain(PLAIN_WAIT_FOR_THE_END))
    assert guilty.code == 3
    assert guilty.error_lines == []
    assert other.code == 1
    assert "failed: its script ended with exit code 3" in other.err
    assert_tidy(other)


def test_an_exit_that_goes_around_sys_exit_is_an_early_end(tmp_path: Path) -> None:
    guilty, other = ends(tmp_path, Plain("raise SystemExit(3)"), Plain("step()"))
    assert guilty.code != 0
    assert other.code == 1
    assert "UnevenRounds" in other.err
    assert_tidy(guilty)
    assert_tidy(other)


@pytest.mark.parametrize("updates_before", [0, 2])  # those after the first are queued by another thread
def test_an_operation_of_the_scripts_own_that_fails_is_what_its_user_sees(
    tmp_path: Path, updates_before: int
) -> None:
    begin = f"""
a, b = (mx.nd.ones((2, 2), dtype="float16") for _ in range(2))
kv.set_optimizer(mx.optimizer.SGD())
kv.init("p", a)
for _ in range({updates_before}):
    kv.push("p", b)
"""
    fails_in_the_engine = """
product = mx.nd.dot(b, b)  # the CPU has none for this type, which shows when it is computed
kv.pushpull("p", product, out=a)
while True:
    time.sleep(0.1)
    kv.pull("k", out=out)
"""
    guilty, other = ends(tmp_path, begin + fails_in_the_engine, begin + "step()")
    assert guilty.code == 1
    assert "MXNetError" in guilty.err.splitlines()[-1] or "FP16" in guilty.err
    assert other.code == 1
    assert "has nothing to send: an operation that it depends on has failed" in other.err


def test_an_update_that_fails_is_an_error_where_its_value_is_read_and_in_each_call_after(
    tmp_path: Path,
) -> None:
    decays = """
optimizer = mx.optimizer.contrib.GroupAdaGrad(learning_rate=0.5)
kv.set_optimizer(optimizer)
kv.init("p", mx.nd.ones((2, 2)))
a = mx.nd.ones((2, 2))
kv.pushpull("p", a, out=a)
optimizer.wd = 0.1  # of which it has none, as it says in its update: the second, which another thread queues
kv.pushpull("p", a, out=a)
try:
    a.asnumpy()
except errors.NetStormError as error:
    show("read:", "Weight decay is not supported" in str(error))
while True:
    time.sleep(0.1)
    kv.pull("k", out=out)
"""
    ended = ends(tmp_path, decays, decays)
    for end in ended:
        assert end.code == 1
        assert end.out == "read: True\n"
        assert "Weight decay is not supported" in end.err.splitlines()[-1]


def test_who_ends_first_goes_on_forwarding_and_all_end_well(tmp_path: Path) -> None:
    hub = """
try:
    sys.exit(7)
except SystemExit:
    pass  # has no consequences
kv.pushpull("k", ones(), out=out)
show("the script is at its end")
"""
    late = Plain("time.sleep(2); step(); assert (out == 3).all(); show('right')")
    ended = ends(tmp_path, hub, late, late, NETSTORM_TOPOLOGY="star", NETSTORM_HUB=0)
    assert [end.code for end in ended] == [0, 0, 0]
    assert [end.err for end in ended] == ["", "", ""]
    assert [end.out for end in ended[1:]] == ["right\n"] * 2


def test_a_thread_may_exit_and_children_may_come_and_go_before_an_orderly_end(tmp_path: Path) -> None:
    script = """
import subprocess, threading
thread = threading.Thread(target=sys.exit, args=(5,))
thread.start(); thread.join()
subprocess.run([sys.executable, "-c", "import sys; sys.exit(4)"])
child = os.fork()
if child == 0:
    sys.exit(6)  # runs its parent's exit functions, too
show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
step()
"""
    ended = ends(tmp_path, script, Plain(script))
    assert [(end.code, end.out, end.err) for end in ended] == [(0, "6\n", "")] * 2
