"""The faults of the churn benchmark are drawn in advance, and its lost time is shared out exactly."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def faults():
    return importlib.import_module("harness.faults")


def test_a_seed_draws_the_same_faults_and_others_draw_others():
    kinds = list(faults().KINDS)
    drawn = faults().plan_faults(5, kinds, 1.0, 60.0)
    assert drawn == faults().plan_faults(5, kinds, 1.0, 60.0)
    assert drawn != faults().plan_faults(6, kinds, 1.0, 60.0)
    assert all(one.at < two.at for one, two in itertools.pairwise(drawn))
    assert 40 < len(drawn) < 90
    assert {one.kind for one in drawn} == set(kinds)


@given(
    st.lists(st.floats(0.0, 60.0), max_size=30),
    st.lists(
        st.tuples(st.sampled_from(["stop", "kill", "cut"]), st.floats(-5.0, 65.0), st.floats(0.0, 9.0)),
        max_size=6,
    ),
)
def test_the_parts_of_the_lost_time_are_all_of_it(completed, spans):
    spans = [faults().Span(what, begin, begin + lasts) for what, begin, lasts in spans]
    found = faults().lost_time(sorted(completed), 0.0, 60.0, 0.5, spans)
    inside = sum(0.0 < at < 60.0 for at in completed)
    assert sum(found.by.values()) == pytest.approx(found.lost_s)
    assert found.lost_s == pytest.approx(60.0 - inside * 0.5)
    seconds = np.arange(0.0, 60.0, 0.05)
    stopped = np.zeros(len(seconds), bool)
    for span in spans:
        if span.what == "stop":
            stopped |= (seconds >= span.begin) & (seconds < span.end)
    assert found.held_s == pytest.approx(stopped.sum() * 0.05, abs=0.5)


def test_while_a_rank_is_stopped_nothing_else_is_to_blame():
    span = faults().Span
    steps = [0.1 * number for number in range(1, 11)] + [4.0 + 0.1 * number for number in range(1, 11)]
    spans = [span("stop", 1.0, 3.0), span("kill", 2.0, 4.05), span("cut", 3.5, 4.05)]
    found = faults().lost_time(steps, 0.0, 5.05, 0.1, spans)
    assert found.held_s == 2.0
    assert found.lost_s == pytest.approx(3.05)
    # The gap is 3.1 s long, of which 3.0 s are lost: 2 s stopped, 0.5 s killed, 0.55 s both, 0.05 s neither.
    share = 3.0 / 3.1
    assert found.by["stop"] == pytest.approx(2.0 * share)
    assert found.by["kill"] == pytest.approx(0.5 * share)
    assert found.by["cut+kill"] == pytest.approx(0.55 * share)


def test_the_ranks_of_a_sum_are_read_from_it_and_a_wrong_element_is_an_error():
    module = importlib.import_module("harness.churn_work")
    ranks = [module.Work(rank) for rank in range(4)]
    for work in ranks:
        work.step = 7
    for group in ([0], [1, 3], [0, 1, 2, 3]):
        sums = {name: sum(ranks[rank].contribution(name) for rank in group) for name in ranks[0].sizes}
        assert ranks[2].ranks_in(sums) == group
        sums["large"][-1] += 1
        with pytest.raises(module.WrongSum, match="'large'"):
            ranks[2].ranks_in(sums)
    twice = {name: 2 * ranks[1].contribution(name) for name in ranks[0].sizes}
    with pytest.raises(module.WrongSum, match="no ranks"):
        ranks[0].ranks_in(twice)


# ------------------------------------------------------------------------------- the command's other systems


def options(*arguments):
    return importlib.import_module("churn")._options(arguments)


def test_rows_of_other_systems_are_named_with_their_checkpoints():
    found = options("--systems", "netstorm,torchft,restart-50").systems
    assert found == ["netstorm", "torchft", "restart-50"]


@pytest.mark.parametrize("wrong", ["gloo", "restart-", "restart-0", "restart--1", "restart-x", "torchft,"])
def test_a_system_that_there_is_not_is_named_with_those_that_there_are(wrong, capsys):
    with pytest.raises(SystemExit):
        options("--systems", wrong)
    assert "expected netstorm, torchft or restart-STEPS" in capsys.readouterr().err


def test_faults_that_there_are_not_are_named_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        options("--faults", "kill,fire")
    assert "'kill,fire': expected some of kill, stop, cut, scheduler" in capsys.readouterr().err


def test_a_system_that_cannot_run_here_says_why(monkeypatch):
    churn = importlib.import_module("churn")
    monkeypatch.setattr(churn.importlib.util, "find_spec", lambda _: None)
    assert churn._why_not("netstorm", options()) == ""
    assert churn._why_not("torchft", options()) == "torchft not installed (pip install torchft)"
    assert churn._why_not("restart-5", options()) == "torch not installed (pip install torch)"
    assert churn._why_not("restart-5", options("--wan", "sites.yaml")) == "on loopback only"
