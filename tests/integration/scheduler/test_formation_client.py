"""Policies are formed in a process of its own, which may die or hang without anybody waiting for it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys

import pytest

from netstorm.scheduler.awareness import Collector
from netstorm.scheduler.policies import FormationRequest, FormationResult
from netstorm.scheduler.policy_former import form
from netstorm.scheduler.process.formation_client import COMMAND, FormationClient
from netstorm.topology.form import form_policy
from netstorm.topology.network import mesh
from netstorm.topology.policy import Options

ANSWER_S = 100.0
"""Longest wait for an answer; the process loads SciPy, which takes seconds on a busy machine."""


def request(number=1, *, tensors=(4_000_000,), topology="auto", custom=""):
    network = mesh(5, seed=2)
    return FormationRequest.of(
        Collector(network, known=True).estimate(0.0),
        number=number,
        topology=topology,
        options=Options(tensors=tensors, chunk_bytes=131_072, custom=custom),
        in_force=form_policy(network, "star"),
    )


@contextlib.contextmanager
def forming(*command, **options):
    answers: queue.Queue[FormationResult] = queue.Queue()
    client = FormationClient(command=command or COMMAND, **options)
    client.deliver = answers.put
    try:
        yield client, answers
    finally:
        client.close()
        client.close()


def python(source):
    return (sys.executable, "-c", source)


def test_what_is_formed_elsewhere_is_what_would_be_formed_here():
    with forming() as (client, answers):
        client.submit(request())
        found = answers.get(timeout=ANSWER_S)
        client.submit(request(2, topology="custom", custom="/nowhere"))
        wrong = answers.get(timeout=ANSWER_S)
    here = form(request())
    assert found.policy == here.policy
    assert (found.number, found.seconds, found.seconds_before) == (1, here.seconds, here.seconds_before)
    assert found.took_s > 0
    assert wrong.policy is None
    assert "/nowhere" in wrong.problem


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("import sys; sys.stdin.buffer.read(4); sys.stdout.write('junk that is no answer')", "has ended"),
    ],
)
def test_a_process_that_dies_or_babbles_is_logged_and_the_next_request_gets_a_new_one(source, says, caplog):
    with forming(*python(source)) as (client, answers):
        for number in (1, 2):
            client.submit(request(number))
            found = answers.get(timeout=ANSWER_S)
            assert (found.number, found.policy) == (number, None)
            assert says in found.problem
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 2


def test_a_formation_that_takes_too_long_is_broken_off():
    with forming(*python("import time; time.sleep(1000)"), limit_s=0.2) as (client, answers):
        client.submit(request())
        assert "longer than 0.2 s" in answers.get(timeout=ANSWER_S).problem


def test_closing_in_the_middle_of_a_formation_does_not_wait_for_it():
    with forming(*python("import time; time.sleep(1000)")) as (client, answers):
        client.submit(request())
    assert answers.empty()


SCHEDULER = """
import sys, time
from tests.integration.scheduler.test_formation_client import FormationClient, request
client = FormationClient()
client.submit(request(topology="custom", custom=sys.argv[1]))
time.sleep(1000)
"""


def test_a_scheduler_that_is_killed_takes_a_formation_along(tmp_path):
    pipe = tmp_path / "custom"
    os.mkfifo(pipe)  # whoever forms a policy with it waits for the end of this file
    with subprocess.Popen([*python(SCHEDULER), str(pipe)]) as scheduler, pipe.open("wb") as kept_open:
        scheduler.send_signal(signal.SIGKILL)
        nobody_reads = select.poll()
        nobody_reads.register(kept_open, 0)
        assert nobody_reads.poll(1000 * ANSWER_S)


def test_a_client_without_a_request_starts_nothing(tmp_path):
    with forming(*python(f"open(r'{tmp_path}/started', 'w')")):
        pass
    assert list(tmp_path.iterdir()) == []
