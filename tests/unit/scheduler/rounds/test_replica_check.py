from netstorm.scheduler.rounds import Drift, ReplicaCheck


def test_equal_replicas_are_forgotten_once_all_have_reported():
    check = ReplicaCheck(3)
    assert [check.record(rank, key=7, round=100, digest=1) for rank in (2, 0, 1)] == [None] * 3
    assert check.record(1, key=7, round=100, digest=5) is None  # a new comparison begins


def test_a_difference_names_both_ranks():
    check = ReplicaCheck(3)
    check.record(2, key=7, round=100, digest=1)
    assert check.record(0, key=7, round=100, digest=2) == Drift(key=7, round=100, first_rank=2, rank=0)


def test_rounds_and_keys_are_compared_apart():
    check = ReplicaCheck(2)
    check.record(0, key=7, round=100, digest=1)
    assert check.record(1, key=7, round=200, digest=2) is None
    assert check.record(1, key=8, round=100, digest=3) is None


def test_memory_is_bounded_when_a_rank_never_reports():
    check = ReplicaCheck(2)
    for round in range(20_000):
        check.record(0, key=0, round=round, digest=round)
    assert check.record(1, key=0, round=0, digest=99) is None  # long forgotten
    assert check.record(1, key=0, round=19_999, digest=99) is not None
