"""Elastic training as users start it: how good models become when ranks die and join; who waits for whom."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import checkpoint, elastic
from tests.integration.forking import ROOT
from tests.integration.torch import test_elastic
from tests.integration.torch.begin import PATIENCE, digest
from tests.integration.torch.elastic_ranks import ElasticRanks, Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DIGEST = r"rank \d: weights sha256 ([0-9a-f]{64})"


def end(ranks: ElasticRanks, names: list[str]) -> tuple[set[str], set[str]]:
    """Wait for processes, which must end well; return their results, and the digests of their weights."""
    for name in names:
        ranks.answer(name, 250)
    ranks.end()
    said = {name: ranks.said(name) for name in names}
    results = {
        match for text in said.values() for match in re.findall(r"(?:accuracy|loss) ([\d.]+) after", text)
    }
    digests = {match for text in said.values() for match in re.findall(DIGEST, text)}
    return results, digests


def wait_on_the_way(folder: Path, ranks: int, steps: int) -> None:
    """Have the example wait after a quarter of its steps until the file "killed" is in `folder`, and after
    half of them until so many ranks contribute: no test has to be in time.
    """
    enough, taken = vars(elastic)["wait_for_enough_nodes"], itertools.count()

    def wait(runtime: Any, answer: Any) -> None:
        enough(runtime, answer)
        step = next(taken)
        while (step == steps // 4 and not (folder / "killed").exists()) or (
            step == steps // 2 and len(runtime.node.live.contributors) < ranks
        ):
            answer()
            time.sleep(0.02)

    vars(elastic)["wait_for_enough_nodes"] = wait


def example(folder: str, arguments: list[str], ranks: int = 0) -> None:
    """Run the example; `ranks`: until so many contribute, it does not end."""
    if ranks:
        wait_on_the_way(Path(folder), ranks, int(arguments[arguments.index("--steps") + 1]))
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["torch_elastic.py", *arguments]
    os.chdir(folder)
    importlib.import_module("torch_elastic").main()


def train(job: Started, folder: Path, *arguments: object, disturbed: bool) -> float:
    """Train at four ranks, one of which is killed and comes back if `disturbed`; return the result."""
    folder.mkdir()
    ranks = job(4, "2:4", folder=folder)
    options = {"arguments": [*map(str, arguments), "--report", "1"], "ranks": 4 if disturbed else 0}
    for rank in range(4):
        ranks.start(str(rank), rank, example, **options)
    names = list("0123")
    if disturbed:
        ranks.wait_until_said("0", "step 30/")
        ranks.kill("1")
        (folder / "killed").touch()
        ranks.wait_until_said("0", "of ranks 0, 2, 3\n")
        ranks.start("back", 1, example, **options)
        names = ["0", "2", "3", "back"]
    results, digests = end(ranks, names)
    assert len(results) == len(digests) == 1
    if disturbed:
        assert "rank 1 joins" in ranks.said("back")
        assert "of ranks 0, 1, 2, 3\n" in ranks.said("back")
    return float(results.pop())


@pytest.mark.parametrize(("model", "steps", "spread"), [("digits", 400, 0.03), ("gpt", 200, 0.3)])
def test_a_model_becomes_as_good_as_without_the_death_of_a_rank(
    job: Started, tmp_path: Path, model: str, steps: int, spread: float
) -> None:
    arguments = ("--model", model, "--steps", steps)
    undisturbed = train(job, tmp_path / "undisturbed", *arguments, disturbed=False)
    result = train(job, tmp_path / "disturbed", *arguments, disturbed=True)
    print(model, undisturbed, result)
    assert abs(result - undisturbed) < spread


def check_sum() -> set[int]:
    """Sum over many chunks, and check that each element has every contributor once, and nobody twice.

    Return the contributors.
    """
    marks = torch.full((100_000,), 16 ** dist.get_rank(), dtype=torch.int64)  # a digit for each rank
    work = dist.all_reduce(marks, async_op=True)
    work.wait()
    in_all = set(range(dist.get_world_size()))
    for total in marks.unique().tolist():
        digits = [total >> 4 * rank & 15 for rank in range(dist.get_world_size())]
        assert max(digits) == 1, digits
        in_all &= {rank for rank, times in enumerate(digits) if times}
    assert in_all == elastic.contributors(work), (in_all, elastic.contributors(work))
    return in_all


def churn(folder: str) -> dict[str, Any]:
    """Train a model of several buckets and many chunks until the file "end" is in `folder`.

    All ranks compare their weights after every third step, and the job ends if one has others.
    """
    elastic.init_process_group(PATIENCE)
    layers = nn.Sequential(*(nn.Linear(400, 400) for _ in range(6)))
    model = elastic.data_parallel(layers, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    entries = {"model": model, "optimizer": optimizer, "ends": torch.zeros(1)}
    state = elastic.ElasticState(verify_every=3, repair=False, **entries)
    generator = torch.Generator().manual_seed(dist.get_rank())
    while not (step := state.step(), state["ends"].item())[1]:
        print(f"step {step} of {list(state.ranks)}", flush=True)
        optimizer.zero_grad()
        model(torch.randn(4, 400, generator=generator)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() in check_sum():
            print("contributes", flush=True)
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return {"step": step, "parameters": digest(model)}


def test_ranks_that_die_and_come_at_any_time_have_right_sums_and_end_with_the_same_bits(job: Started) -> None:
    random = Random(1)
    ranks = job(4, "1:5")
    alive = {rank: f"first {rank}" for rank in range(4)}
    for rank, name in alive.items():
        ranks.start(name, rank, churn)
    for name in alive.values():
        ranks.wait_until_said(name, "step 3 ")
    for event in range(24):
        time.sleep(random.uniform(0.1, 1.0))
        # The job ends with the last rank that contributes; who has just come takes steps before it does, and
        # hears of the last step before them, in which the process that had its rank may have been.
        contribute = {rank for rank, name in alive.items() if "contributes" in ranks.said(name)}
        victim = random.choice(list(alive))
        if random.random() < 0.5 and contribute - {victim}:
            ranks.kill(alive.pop(victim))
        elif len(alive) < 5:
            rank = random.choice([rank for rank in range(5) if rank not in alive])
            alive[rank] = f"event {event}"
            ranks.start(alive[rank], rank, churn)
    for name in alive.values():
        ranks.wait_until_said(name, "step ")
    (ranks.folder / "end").touch()
    answers = [ranks.answer(name) for name in alive.values()]
    ranks.end()
    assert all(answer == answers[0] for answer in answers)


def save(folder: str) -> dict[str, Any]:
    """Train, and save a checkpoint before every third step, until the file "end" is in `folder`."""
    elastic.init_process_group(PATIENCE)
    model = elastic.data_parallel(nn.Linear(100, 100))
    optimizer = torch.optim.Adam(model.parameters())
    state = elastic.ElasticState(model=model, optimizer=optimizer, ends=torch.zeros(1))
    while not (step := state.step(), state["ends"].item())[1]:
        if step % 3 == 0:
            checkpoint.save(f"{folder}/saved", {"model": model, "optimizer": optimizer}, step=step, keep=3)
        print(f"step {step} of {list(state.ranks)}", flush=True)
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    final = {"model": model, "optimizer": optimizer}
    checkpoint.save(f"{folder}/saved", final, step=step).wait()
    loaded = checkpoint.load(f"{folder}/saved")
    assert loaded is not None
    assert loaded.step == step
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state["model"][name], value), name
    dist.destroy_process_group()
    return {"step": step, "files": len(list(loaded.path.glob("*.safetensors")))}


def test_the_ranks_that_are_there_save_checkpoints_while_others_die_and_join(job: Started) -> None:
    ranks = job(3, "1:4")
    for rank in range(3):
        ranks.start(str(rank), rank, save)
    ranks.wait_until_said("2", "step 4 ")
    ranks.kill("0")
    ranks.wait_until_said("2", "of [1, 2]")
    ranks.start("back", 0, save)
    ranks.wait_until_said("back", "of [0, 1, 2]")
    (ranks.folder / "end").touch()
    answers = [ranks.answer(name) for name in ("1", "2", "back")]
    ranks.end()
    assert answers[0]["files"] == 3
    assert answers == answers[:1] * 3


def compute(folder: str, *, stops: bool = False) -> int:
    """Train with steps that take as long as they have samples, and nothing else; return the last step.

    Args:
        folder: of the test.
        stops: this process stops itself in its first step, of which it has made no call.
    """
    elastic.init_process_group(PATIENCE)
    model = elastic.data_parallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = elastic.ElasticSampler(1000, 10)
    state = elastic.ElasticState(model=model, optimizer=optimizer, sampler=sampler, ends=torch.zeros(1))
    while not (step := state.step(), state["ends"].item())[1]:
        print(f"step {step} of {list(state.ranks)}", flush=True)
        if stops:
            stops = False
            os.kill(os.getpid(), signal.SIGSTOP)
        batch = sampler.take()
        time.sleep(0.015 * len(batch))
        optimizer.zero_grad()
        model(torch.ones(len(batch), 1)).mean().backward()
        optimizer.step()
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return step


def test_a_newcomer_catches_up_with_ranks_that_compute_nearly_all_the_time(job: Started) -> None:
    ranks = job(2, "1:3")
    for rank in range(2):
        ranks.start(str(rank), rank, compute)
    ranks.wait_until_said("0", "step 2 ")
    ranks.start("new", 2, compute, stops=True)
    ranks.wait_until_stopped("new")
    first = int(re.findall(r"^step (\d+) ", ranks.said("0"), re.MULTILINE)[-1])
    ranks.wait_until_said("0", f"step {first + 15} ")
    ranks.send("new", signal.SIGCONT)  # fifteen steps behind, which waiting for others does not make up for
    ranks.wait_until_said("0", "of [0, 1, 2]")
    (ranks.folder / "end").touch()
    assert len({ranks.answer(name) for name in ("0", "1", "new")}) == 1
    ranks.end()


def test_a_rank_that_was_stopped_for_too_long_hears_that_it_is_out_and_its_successor_joins(
    job: Started,
) -> None:
    ranks = job(3, "1:3", PS_HEARTBEAT_INTERVAL=0.5, PS_HEARTBEAT_TIMEOUT=2, NETSTORM_WAIT_TIMEOUT=8)
    for rank in range(3):
        ranks.start(str(rank), rank, test_elastic.train)
    ranks.wait_until_said("0", "step 3 ")
    ranks.send("1", signal.SIGSTOP)
    ranks.wait_until_said("0", "of [0, 2]")
    ranks.send("1", signal.SIGCONT)
    with pytest.raises(AssertionError, match=r"NodeRemoved: rank 1 .* out of the job since view 1"):
        ranks.answer("1")
    ranks.start("back", 1, test_elastic.train)
    ranks.wait_until_said("back", "of [0, 1, 2]")
    (ranks.folder / "end").touch()
    assert len({ranks.answer(name)["parameters"] for name in ("0", "2", "back")}) == 1
    ranks.end()


def test_with_too_few_nodes_a_step_waits_until_others_have_joined(job: Started) -> None:
    ranks = job(2, "2:2")
    ranks.start("0", 0, test_elastic.train)
    ranks.start("1", 1, test_elastic.train)
    ranks.wait_until_said("0", "step 3 ")
    ranks.kill("1")
    ranks.wait_until_said("0", "the job has 1 nodes (ranks 0) and waits until there are 2 (NETSTORM_ELASTIC")
    ranks.start("back", 1, test_elastic.train)
    ranks.wait_until_said("back", "of [0, 1]")
    (ranks.folder / "end").touch()
    assert ranks.answer("0")["parameters"] == ranks.answer("back")["parameters"]
    ranks.end()


def test_a_job_that_waits_for_too_long_ends_and_says_for_what(job: Started) -> None:
    ranks = job(2, "2:2", NETSTORM_WAIT_FOR_NODES=1)
    ranks.start("0", 0, test_elastic.train)
    ranks.start("1", 1, test_elastic.train)
    ranks.wait_until_said("0", "step 3 ")
    ranks.kill("1")
    with pytest.raises(AssertionError, match=r"no others came within 1 s \(NETSTORM_WAIT"):
        ranks.answer("0")


def test_a_rank_whose_weights_have_changed_takes_over_those_of_most(job: Started) -> None:
    ranks = job(3, "1:3")
    for rank in range(3):
        ranks.start(str(rank), rank, test_elastic.train, fails_at=7 if rank == 1 else -1)
    ranks.wait_until_said("0", "before step 10, the state of rank 1 differs from that of rank 0")
    ranks.wait_until_said("0", "step 12 ")
    (ranks.folder / "end").touch()
    assert len({ranks.answer(name)["parameters"] for name in "012"}) == 1
    assert ranks.said("2").count("differs") == 1
    ranks.end()


def test_the_launcher_starts_a_killed_rank_again_and_it_joins(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netstorm", "launch", "--no-prefix", "-n", "2", "--restarts", "2", "--"]
    example = [sys.executable, str(ROOT / "examples" / "torch_elastic.py"), "--steps", "60", "--report", "1"]
    with subprocess.Popen(
        [*command, *example],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NETSTORM_ELASTIC": "2:2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "rank 1: step 20/60" in line:
                os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said
    assert re.search(r"rank 1 on 127\.0\.0\.1 was killed by SIGKILL(: .*)?; it is started again", said)
    assert "rank 1 joins" in said
    digests = re.findall(DIGEST, said)
    assert len(digests) == 2, said
    assert len(set(digests)) == 1


def rank_of(launcher: int, rank: int) -> int:
    """Return the number of a rank's process."""
    found: Iterator[Any] = (
        child.pid
        for child in psutil.Process(launcher).children(recursive=True)
        if child.environ().get("NETSTORM_RANK") == str(rank)
    )
    return int(next(found))
