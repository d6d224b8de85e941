"""Where a process ends or forks with operations outstanding, MXNet's other engines, and how its threads run.

What becomes of Ctrl-C is in `integration/failures`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.mxnet.script_process import Script

OUTSTANDING = """
out = mx.nd.zeros((3,))
completion = started(writes=(out,))
"""


def test_what_is_outstanding_at_exit_fails_and_the_process_ends_with_its_own_code(
    script: Callable[..., Script],
) -> None:
    process = script(OUTSTANDING + "later = out + 1; show('last line'); raise SystemExit(7)")
    process.wait_for("last line")
    assert process.end() == 7
    assert "Closed: the process ended before the network operation did" in process.errors


def test_a_process_that_ends_the_moment_its_operations_complete_does_not_abort(
    script: Callable[..., Script],
) -> None:
    # Without the hook's `drain` two runs of five ended in "terminate called": the engine let go of the
    # operations while the interpreter was being finalised.
    process = script("""
outs = [mx.nd.zeros((1,)) for _ in range(50)]
completions = [started(writes=(out,)) for out in outs]
go = threading.Event()
def complete():
    go.wait()
    for completion in completions:
        completion.succeed()
threading.Thread(target=complete, daemon=True).start()
go.set()
mx.nd.waitall()
""")
    assert process.end() == 0
    assert process.errors == ""


def test_a_fork_waits_for_all_operations_and_the_child_has_an_engine_of_its_own(
    script: Callable[..., Script],
) -> None:
    process = script(
        OUTSTANDING
        + """
forking = threading.Event()
def complete():
    forking.wait()
    completion.succeed()
threading.Thread(target=complete, daemon=True).start()
sys.setswitchinterval(100)  # from here on nobody takes the interpreter away from a thread that does not wait
forking.set()
child = os.fork()
if child == 0:
    a, b = mx.nd.ones((3,)), mx.nd.zeros((3,))
    done = started(reads=(a,), writes=(b,))
    show("child", engine.live_count(), (a + 1).asnumpy().tolist())
    done.succeed()
    b.wait_to_read()
    sys.exit(3)
show("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.asnumpy().tolist())
"""
    )
    assert process.end() == 0, process.errors
    assert "child 1 [2.0, 2.0, 2.0]" in process.output
    assert "parent 3 [0.0, 0.0, 0.0]" in process.output


def test_under_the_naive_engine_a_push_waits_for_its_completion_and_raises_its_error(
    script: Callable[..., Script],
) -> None:
    process = script(
        """
out, buffer = mx.nd.zeros((3,)), StagingBuffer((3,), "float32")
def elsewhere(end):
    def start(completion):
        np.frombuffer(buffer.memory(), np.float32)[:] = 7
        threading.Timer(0.1, end, (completion,)).start()
    return start
def push(start):
    push_async(start, reads=(out,), writes=(buffer.array,), name="test")
push(elsewhere(lambda completion: completion.succeed()))
buffer.copy_to(out)
show("values", out.asnumpy().tolist())
push(lambda completion: completion.succeed())
try:
    push(elsewhere(lambda completion: completion.fail(NodeLost("rank 2"))))
except NodeLost as error:
    show("raised", error, isinstance(error, MXNetError), engine.live_count(), engine.drain(60))
try:
    push(lambda completion: os.kill(os.getpid(), signal.SIGINT))
except KeyboardInterrupt:
    show("interrupted", engine.live_count(), engine.drain(60))
""",
        MXNET_ENGINE_TYPE="NaiveEngine",
    )
    assert process.end() == 0, process.errors
    assert "values [7.0, 7.0, 7.0]" in process.output
    assert "raised rank 2 True 0 True" in process.output
    assert "interrupted 0 True" in process.output
    assert "NaiveEngine: nothing overlaps with the network" in process.errors


POLICIES = """
import collections
def policies():
    engines, others = collections.Counter(), set()
    started = {thread.native_id for thread in threading.enumerate()}
    for thread in map(int, os.listdir("/proc/self/task")):
        policy = os.sched_getscheduler(thread)
        if thread in started:
            others.add(policy)
        else:
            engines[policy] += 1
    return dict(engines), others
batch, other = {os.SCHED_BATCH: 1 + int(os.environ["MXNET_CPU_WORKER_NTHREADS"])}, {os.SCHED_OTHER}
mx.nd.ones((3,)).wait_to_read()
"""


def test_the_engine_s_threads_compute_in_the_background_and_do_so_after_a_fork(
    script: Callable[..., Script],
) -> None:
    process = script(
        POLICIES
        + """
show("at first", policies() == (batch, other), policies())
mx.nd.waitall()
engine.drain(60)
if os.fork() == 0:
    os._exit(0)
os.wait()
deadline = time.monotonic() + 60
while policies() != (batch, other) and time.monotonic() < deadline:
    for _ in range(4):
        push_async(lambda completion: completion.succeed(), reads=(), writes=(), name="test")
    time.sleep(0.02)
show("after a fork", policies() == (batch, other), policies())
""",
        MXNET_CPU_WORKER_NTHREADS="3",
        OMP_NUM_THREADS="1",
    )
    assert process.end() == 0, process.errors
    assert "at first True" in process.output, process.output
    assert "after a fork True" in process.output, process.output


def test_a_policy_that_was_chosen_before_stays(script: Callable[..., Script]) -> None:
    process = script("""
from netstorm.frontends.mxnet.engine import compute_in_background
def work(policy):
    os.sched_setscheduler(0, policy, os.sched_param(0))
    compute_in_background()
    show(policy == os.SCHED_IDLE, "became", os.sched_getscheduler(0) == os.SCHED_BATCH)
for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
    thread = threading.Thread(target=work, args=(policy,))
    thread.start()
    thread.join()
""")
    assert process.end() == 0, process.errors
    assert process.output.splitlines() == ["True became False", "False became True"]
