import pytest

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.protocol.messages import Binding
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree


def policy(version):
    return Policy(
        version=version,
        trees=(Tree(root=Rank(0), reduce_parent=(-1, 0), broadcast_parent=(-1, 0)),),
        weights=(1000,),
        reason="test",
    )


def bound(key, from_round, version, granted):
    return Binding(key=key, from_round=from_round, version=version, granted=granted)


def test_a_round_runs_under_the_last_binding_before_it():
    bindings = Bindings(rank=0)
    bindings.bind(bound(7, 0, 1, 3))
    bindings.bind(bound(7, 4, 2, 6))
    assert [bindings.version_of(7, round) for round in (0, 3, 4, 6)] == [1, 1, 2, 2]


def test_a_round_that_was_not_granted_has_no_version_yet():
    bindings = Bindings(rank=0)
    bindings.bind(bound(7, 0, 1, 3))
    assert bindings.version_of(7, 4) is None
    assert bindings.version_of(8, 0) is None


def test_bindings_that_come_out_of_order_mean_the_same():
    bindings = Bindings(rank=0)
    bindings.bind(bound(7, 4, 2, 6))
    bindings.bind(bound(7, 0, 1, 3))
    assert bindings.version_of(7, 3) == 1
    assert bindings.version_of(7, 6) == 2


def test_a_binding_that_contradicts_an_earlier_one_is_a_violation():
    bindings = Bindings(rank=0)
    bindings.bind(bound(7, 4, 2, 6))
    with pytest.raises(ProtocolViolation, match="bound round 4 of key 7 to policy 2 and now to 3"):
        bindings.bind(bound(7, 4, 3, 6))


def test_what_was_bound_before_a_view_runs_under_its_policy_whichever_it_was_bound_to():
    """The scheduler forgets what all others have begun before the view."""
    bindings = Bindings(rank=0)
    bindings.bind(bound(7, 4, 2, 6))
    bindings.begin_view(3)
    bindings.bind(bound(7, 4, 0, 9))
    assert [bindings.version_of(7, round) for round in (4, 9)] == [3, 3]
    with pytest.raises(ProtocolViolation):
        bindings.bind(bound(7, 4, 5, 9))


def test_old_rows_and_policies_are_forgotten_but_recent_policies_stay():
    bindings = Bindings(rank=0)
    for version in range(1, 100):
        bindings.install(policy(version))
        bindings.bind(bound(7, version * 10, version, version * 10 + 9))
        bindings.forget_before(7, version * 10)
    assert bindings.plan(1) is None
    assert bindings.plan(99) is not None
    assert bindings.plan(60) is not None  # another rank's question may still be under way
    assert bindings.version_of(7, 995) == 99


def test_a_rank_that_lags_keeps_the_policies_that_its_next_rounds_may_have_been_bound_to():
    bindings = Bindings(rank=0)
    for version in range(1, 200):
        bindings.install(policy(version))
    bindings.bind(bound(7, 0, 10, 9))  # others may have bound rounds from 10 on to any policy since
    bindings.bind(bound(8, 0, 150, 0))
    bindings.bind(bound(8, 1, 199, 1))
    bindings.forget_before(8, 1)
    assert bindings.plan(9) is None
    assert [bindings.plan(version) is not None for version in (10, 100, 199)] == [True] * 3


def test_a_key_that_rests_does_not_keep_more_than_a_thousand_policies():
    bindings = Bindings(rank=0)
    bindings.bind(bound(7, 0, 1, 9))
    for version in range(1, 1200):
        bindings.install(policy(version))
        bindings.bind(bound(8, version, version, version))
        bindings.forget_before(8, version)
    assert bindings.plan(1) is not None  # a round may still run under it
    assert len(bindings.plans) <= 1026
