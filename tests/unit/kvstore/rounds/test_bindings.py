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
