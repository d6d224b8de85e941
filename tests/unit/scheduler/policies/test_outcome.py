"""A policy that was to be better is judged by the rounds under it."""

from __future__ import annotations

import math

import pytest

from netstorm.scheduler.policies.outcome import Outcome
from netstorm.topology.networks.network import Network
from netstorm.topology.schemes.form import form_policy

BEFORE = form_policy(Network.uniform(3), "star")


def rounds(outcome, first, *seconds):
    for round, took in enumerate(seconds, first):
        for rank in range(3):
            outcome.took(round, took + 0.1 * rank)  # the last to begin, here rank 0, waits for nobody


def tried(*seconds, before=(2.0, 2.0)):
    outcome = Outcome()
    rounds(outcome, 0, *before)
    outcome.installed(BEFORE, {0: 2})
    rounds(outcome, 2, *seconds)
    return outcome


def test_a_policy_under_which_rounds_take_longer_is_taken_back():
    assert tried(9.0, 3.0, 4.0).verdict() == (BEFORE, 2.0, 3.0)


@pytest.mark.parametrize("seconds", [(9.0, 2.1, 3.0), (9.0, 1.0, 1.0), (9.0, 3.0, 2.0)])
def test_one_under_which_they_do_not_stays(seconds):
    outcome = tried(*seconds)
    assert outcome.verdict() is None
    rounds(outcome, 5, 9.0, 9.0, 9.0)  # what comes later is the network's doing
    assert outcome.verdict() is None


def test_it_takes_two_rounds_after_the_first_to_judge():
    assert tried(9.0, 9.0).verdict() is None
    outcome = tried(9.0, 9.0)
    rounds(outcome, 4, 9.0)
    assert outcome.verdict() is not None
    assert outcome.verdict() is None  # said once


def test_what_made_a_new_policy_necessary_may_have_come_in_the_last_round():
    assert tried(9.0, 4.0, 4.0, before=(2.0, 5.0)).verdict() is None


def test_without_rounds_before_nothing_is_worse():
    assert tried(9.0, 9.0, 9.0, before=()).verdict() is None


def test_a_policy_that_follows_one_on_trial_is_compared_with_the_one_before_both():
    outcome = tried(4.0)
    later = form_policy(Network.uniform(3), "ring")
    outcome.installed(later, {0: 3})
    rounds(outcome, 3, 4.0, 4.0, 4.0)
    assert outcome.verdict() == (BEFORE, 2.0, 4.0)


def test_a_policy_that_had_to_be_is_not_judged():
    outcome = tried(9.0)
    outcome.forget()
    rounds(outcome, 3, 9.0, 9.0, 9.0)
    assert outcome.verdict() is None


def test_the_slowest_key_says_when_a_policy_began():
    outcome = Outcome()
    rounds(outcome, 0, 2.0, 2.0, 2.0, 2.0)
    outcome.installed(BEFORE, {0: 2, 1: 4})
    rounds(outcome, 4, 9.0, 3.0, 3.0)
    assert outcome.verdict() == (BEFORE, 2.0, 3.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_what_cannot_be_is_left_out(seconds):
    outcome = tried(9.0, 3.0)
    outcome.took(4, seconds)
    outcome.took(-1, 3.0)
    assert outcome.verdict() is None


def test_a_policy_that_takes_over_is_compared_with_what_rounds_would_have_taken():
    outcome = Outcome()
    rounds(outcome, 0, 2.0, 2.0)
    outcome.installed(BEFORE, {0: 2}, expected_s=5.0)
    rounds(outcome, 2, 4.0, 4.0, 4.0)
    assert outcome.verdict() is None
    outcome.installed(BEFORE, {0: 5}, expected_s=5.0)
    rounds(outcome, 5, 6.0, 6.0, 6.0)
    assert outcome.verdict() == (BEFORE, 5.0, 6.0)
