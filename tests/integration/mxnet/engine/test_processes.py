"""Where a process ends, forks or is interrupted with operations outstanding, and MXNet's other engines."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.mxnet.script_process import Script

OUTSTANDING = """
out = mx.nd.zeros((3,))
completion = started(writes=(out,))
"""

COMPLETE_SOON = """
forking = threading.Event()
def complete():
    forking.wait()
    completion.succeed()
threading.Thread(target=complete, daemon=True).start()
sys.setswitchinterval(100)  # from here on nobody takes the interpreter away from a thread that does not wait
"""


# -------------------------------------------------------------------------------------------------------- end


def test_an_operation_that_never_completes_keeps_the_process_from_ending(
    script: Callable[..., Script],
) -> None:
    process = script(
        OUTSTANDING + "import atexit; atexit.unregister(engine._finish_at_exit); show('last line')"
    )
    assert process.is_stuck(after="last")


def test_what_is_outstanding_at_exit_fails_and_the_process_ends_with_its_own_code(
    script: Callable[..., Script],
) -> None:
    process = script(OUTSTANDING + "later = out + 1; show('last line'); raise SystemExit(7)")
    process.wait_for("last line")
    assert process.end(timeout_s=20) == 7
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


# ------------------------------------------------------------------------------------------------------- fork


def test_forking_with_an_operation_outstanding_is_a_trap(script: Callable[..., Script]) -> None:
    process = script(
        OUTSTANDING + COMPLETE_SOON + "show('forking'); forking.set(); os.fork(); show('forked')"
    )
    assert process.is_stuck(after="forking")
    assert "forked" not in process.output


def test_waiting_for_all_operations_before_the_fork_is_the_remedy(script: Callable[..., Script]) -> None:
    process = script(
        OUTSTANDING
        + COMPLETE_SOON
        + """
os.register_at_fork(before=mx.nd.waitall)
forking.set()
engine._held[10**9] = engine._live[10**9] = None  # as if the engine had not let go of it yet
child = os.fork()
if child == 0:
    show("child's", engine.live_count(), engine.drain(0))
    a, b = mx.nd.ones((3,)), mx.nd.zeros((3,))
    done = started(reads=(a,), writes=(b,))  # the child has an engine of its own
    show("child", engine.live_count(), (a + 1).asnumpy().tolist())
    done.succeed()
    b.wait_to_read()
    sys.exit(3)
show("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.asnumpy().tolist())
del engine._held[10**9], engine._live[10**9]
"""
    )
    assert process.end() == 0, process.errors
    assert "child's 0 True" in process.output
    assert "child 1 [2.0, 2.0, 2.0]" in process.output
    assert "parent 3 [0.0, 0.0, 0.0]" in process.output


# ----------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_is_ignored_while_python_is_blocked_inside_mxnet(script: Callable[..., Script]) -> None:
    process = script(OUTSTANDING + "show('waiting'); mx.nd.waitall(); show('waited')")
    process.wait_for("waiting")
    process.interrupt()
    assert process.is_stuck(after="waiting")


def test_a_thread_at_the_wakeup_descriptor_lets_ctrl_c_through(script: Callable[..., Script]) -> None:
    process = script("""
woken, waker = socket.socketpair()
waker.setblocking(False)
signal.set_wakeup_fd(waker.fileno())
def watch():
    while signal.SIGINT in woken.recv(16):
        engine.fail_all(NodeLost("interrupted by Ctrl-C"))
threading.Thread(target=watch, daemon=True).start()
for blocked in (mx.nd.waitall, lambda: (out + 1).asnumpy()):
    out = mx.nd.zeros((3,))
    started(writes=(out,))
    try:
        show("waiting in", blocked.__name__)
        blocked()
    except KeyboardInterrupt:
        show("interrupted in", blocked.__name__)
    try:
        mx.nd.waitall()
    except NodeLost:
        pass
""")
    for blocked in ("waitall", "<lambda>"):
        process.wait_for(f"waiting in {blocked}")
        process.interrupt()
        process.wait_for(f"interrupted in {blocked}")
    assert process.end() == 0, process.errors


# ---------------------------------------------------------------------------------------------- other engines


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
    show("raised", error, isinstance(error, MXNetError), engine.live_count(), engine.drain(5))
try:
    push(lambda completion: os.kill(os.getpid(), signal.SIGINT))
except KeyboardInterrupt:
    show("interrupted", engine.live_count(), engine.drain(5))
""",
        MXNET_ENGINE_TYPE="NaiveEngine",
    )
    assert process.end() == 0, process.errors
    assert "values [7.0, 7.0, 7.0]" in process.output
    assert "raised rank 2 True 0 True" in process.output
    assert "interrupted 0 True" in process.output
    assert "NaiveEngine: nothing overlaps with the network" in process.errors


def test_the_pooled_engine_works_as_the_default_one_does(script: Callable[..., Script]) -> None:
    process = script(
        """
outs = [mx.nd.zeros((3,)) for _ in range(20)]
completions = [started(writes=(out,)) for out in outs]
sums = [out + 1 for out in outs]
completions[0].fail(NodeLost("rank 2"))
for completion in completions[1:]:
    completion.succeed()
try:
    sums[0].asnumpy()
except NodeLost as error:
    show("raised", error)
show("values", sums[1].asnumpy().tolist())
""",
        MXNET_ENGINE_TYPE="ThreadedEngine",
    )
    assert process.end() == 0, process.errors
    assert "raised rank 2" in process.output
    assert "values [1.0, 1.0, 1.0]" in process.output


# ------------------------------------------------------------------------------------------------- scheduling

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
batch, other = {os.SCHED_BATCH: 4 + int(os.environ["MXNET_CPU_WORKER_NTHREADS"])}, {os.SCHED_OTHER}
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
engine.drain(5)
if os.fork() == 0:
    os._exit(0)
os.wait()
deadline = time.monotonic() + 20
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
