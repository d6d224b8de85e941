from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from netstorm.dashboard.recording import read_recording
from netstorm.errors import UsageError
from netstorm.lab.commands.simulate import CaseTimeout, Study, StudyOptions, check_plot, draw_plot
from netstorm.lab.commands.simulate_worker import (
    OPTIMUM,
    Answer,
    Case,
    CaseBegun,
    CaseEnded,
    CaseFailed,
    Formed,
    Generated,
    RoundDone,
    Stored,
    run_case,
)
from netstorm.lab.simulation.experiment import Engine, Experiment

NETWORK = Path(__file__).parents[4] / "examples" / "networks" / "internet2.yaml"


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], prog_name="netstorm")


def options(**more):
    given = {
        "family": "mesh",
        "path": None,
        "nodes": 4,
        "seeds": (0, 1, 2),
        "changing": False,
        "topologies": ("star", "fapt"),
        "experiment": Experiment(tensors=(1000,), chunk_bytes=1000),
        "engine": Engine.PREDICTOR,
        "engine_reason": "asked for",
        "limit_s": 60.0,
    }
    return StudyOptions(**{**given, **more})


class Scripted:
    """A worker whose answers are given by (scheme, seed); CaseTimeout and KeyboardInterrupt are raised."""

    def __init__(self, **answers):
        self.answers = answers
        self.cases = []

    def run(self, case, limit_s):
        self.cases.append((case.topology, case.seed))
        if case.topology == OPTIMUM:
            yield CaseEnded(optimum_s=1.0)
            return
        yield Formed(formation_s=0.01, reason="as told")
        found = self.answers.get(f"{case.topology}{case.seed}", 2.0)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, CaseFailed):
            yield found
        else:
            yield RoundDone(seconds=found)
            yield CaseEnded()


def studied(given=None, **answers):
    study, worker = Study(given or options()), Scripted(**answers)
    try:
        study.run(worker, lambda _text: None)
    except KeyboardInterrupt:
        study.interrupted = True
    return study, worker


def test_all_schemes_of_a_seed_come_before_the_next_seed():
    study, worker = studied()
    assert worker.cases[:4] == [(OPTIMUM, 0), ("star", 0), ("fapt", 0), (OPTIMUM, 1)]
    assert study.times("star") == {0: 2.0, 1: 2.0, 2: 2.0}
    assert study.as_json()["summary"]["fapt"]["of_optimum"] == 0.5
    assert not study.failed


def test_a_scheme_that_takes_too_long_is_left_out_from_there_on_and_named():
    study, worker = studied(fapt1=CaseTimeout())
    assert ("fapt", 2) not in worker.cases
    assert study.times("fapt") == {0: 2.0}
    assert "not simulated for seed 1" in study.as_json()["skipped"]["fapt"][0]
    assert study.times("star").keys() == {0, 1, 2}


def test_a_scheme_that_does_not_suit_a_network_fails_nothing():
    study, _ = studied(fapt0=CaseFailed(message="no path", unfit=True))
    assert study.times("fapt").keys() == {1, 2}
    assert study.problems("fapt") == ["no path"]
    assert not study.failed


def test_a_simulation_that_breaks_is_a_failure():
    assert studied(fapt0=CaseFailed(message="a wrong sum", unfit=False))[0].failed


def test_what_was_done_before_an_interrupt_is_kept():
    study, _ = studied(star1=KeyboardInterrupt())
    found = study.as_json()
    assert found["interrupted"]
    assert found["seeds"][0]["schemes"]["fapt"]["seconds"] == 2.0
    assert found["seeds"][1]["schemes"]["star"]["error"] == "interrupted"
    assert found["seeds"][2]["schemes"] == {}


@pytest.mark.parametrize("given", [{"nodes": 65}, {"changing": True}])
def test_no_optimum_is_looked_for_where_it_takes_too_long_or_means_nothing(given):
    study, worker = studied(options(**given))
    assert OPTIMUM not in [name for name, _ in worker.cases]
    assert study.notes[0].startswith("no optimum")
    assert study.as_json()["summary"]["star"]["of_optimum"] is None


def case(**more):
    given = {
        "network": Generated(family="mesh", nodes=3, seed=1),
        "topology": "star",
        "tensors": (100_000,),
        "chunk_bytes": 10_000,
        "rounds": 2,
        "seed": 1,
        "engine": "predictor",
    }
    return Case(**{**given, **more})


def answers_to(case):
    found: list[Answer] = []
    run_case(case, found.append)
    return [one for one in found if one != CaseBegun()]


@pytest.mark.parametrize("engine", ["cluster", "predictor"])
def test_the_worker_tells_of_the_policy_and_of_each_round(engine):
    formed, first, second, end = answers_to(case(engine=engine))
    assert "hub" in formed.reason
    assert first.seconds == pytest.approx(second.seconds, rel=0.2)
    assert end == CaseEnded()


def test_the_worker_finds_an_optimum_that_no_scheme_beats():
    (end,) = answers_to(case(topology=OPTIMUM))
    assert 0 < end.optimum_s < answers_to(case())[1].seconds


@pytest.mark.parametrize("wrong", [{"topology": "nix"}, {"network": Stored(path="/no/such/file.yaml")}])
def test_the_worker_says_what_cannot_be_done(wrong):
    (failed,) = answers_to(case(**wrong))
    assert failed.unfit
    assert "\n" not in failed.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "nix"], "--family 'nix': expected one of mesh"),
        (["--nodes", 1], "--nodes 1: expected 2 to"),
        (["--topology", "star,nix"], "--topology 'nix': expected all, or some of star"),
        (["--topology", "custom"], "--topology 'custom'"),
        (["--limit", "0s"], "--limit 0s"),
        (["--chunk", "1B"], "chunks of 1 bytes"),
        (["--model", "nix"], "'nix'"),
        (["--network", "/no/such.yaml"], "/no/such.yaml"),
        (["--network", NETWORK, "--nodes", 4], "--nodes 4 with --network"),
        (["--json", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
        (["--engine", "cluster", "--nodes", 500], "of memory"),
        (["--record", "a", "--model", "1MB"], "schemes and 10 seeds: expected one of each"),
        (["--record", "a", "--engine", "predictor"], "the predictor has no job to record"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_simulated_job_is_recorded(tmp_path):
    path = tmp_path / "job.jsonl"
    one = ("-n", 3, "--seeds", 1, "--topology", "fapt", "--model", "4MB")
    made = run(*one, "--record", path)
    assert made.exit_code == 0, made.output
    statuses = list(read_recording(path))
    assert statuses[-1].phase == "running"
    assert len(statuses[-1].nodes) == 3


def test_a_plot_needs_a_kind_of_file_that_can_be_drawn(tmp_path):
    with pytest.raises(UsageError, match=r"\.png"):
        check_plot(tmp_path / "out.gif")
    with pytest.raises(UsageError, match="there is no folder"):
        check_plot(tmp_path / "no" / "out.png")


def test_a_plot_is_drawn_of_what_is_known(tmp_path):
    pytest.importorskip("matplotlib")
    study, _ = studied(star0=30.0, fapt1=CaseTimeout())
    file = tmp_path / "out.svg"
    draw_plot(study, file)
    text = file.read_text()
    assert "<svg" in text
    assert len(text) > 5000
