"""What the page is told of a job: frames, points and events, made of its statuses."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.dashboard.history import History, frame_of
from netstorm.lab.testing.watched_job import large_job
from netstorm.scheduler.status import FailedLinkStatus, FormerPolicy, ViewChangeStatus, ViewStatus

replace = msgspec.structs.replace
BEGIN = 1000.0
STATUS = large_job(9, time=BEGIN)


def job(time: float = BEGIN, **changed: object):
    return replace(STATUS, time=time, **changed)


def events_of(*statuses) -> list[tuple[str, str]]:
    history = History()
    for status in statuses:
        history.add(status)
    return [(event.kind, event.text) for event in history.events]


def test_a_policy_is_an_event_with_its_reason_once_and_so_are_those_before_it():
    first = job()
    policy = replace(first.policy, version=3, reason="link 0→1 fell")
    former = FormerPolicy(version=2, reason="measured", ended_s=1.0, lasted_s=20.0)
    second = job(BEGIN + 1, policy=policy, former=(former,))
    history = History()
    new = [history.add(status).events for status in (first, second, replace(second, time=BEGIN + 2))]
    assert [[event.text for event in each] for each in new] == [
        [f"Policy 1: {first.policy.reason}"],
        ["Policy 2: measured", "Policy 3: link 0→1 fell"],
        [],
    ]
    assert [event.time for event in new[1]] == [BEGIN + 1 - 21, BEGIN + 1 - 5]


def test_losses_failed_links_and_what_becomes_of_nodes_are_events_in_words():
    failed = FailedLinkStatus(source=0, target=1, reason="no answer", since_s=0.5)
    change = ViewChangeStatus(view=1, members=8, text="rank 8 is lost", ago_s=0.2)
    view = ViewStatus(number=1, fewest=3, most=9, silent=(), waiting="", changes=(change,))
    before = job()
    gone = replace(before.nodes[8], state="left")
    after = job(
        BEGIN + 1,
        nodes=(*before.nodes[:8], gone),
        failed_links=(failed,),
        view=view,
        phase="failed",
        text="no",
    )
    assert set(events_of(before, after)[1:]) == {
        ("link", "Link 0 → 1 has failed: no answer"),
        ("view", "View 1, 8 nodes: rank 8 is lost"),
        ("node", "Rank 8 (site-1) has left"),
        ("job", "The job is failed: no"),
    }
    assert ("link", "Link 0 → 1 is back") in events_of(after, job(BEGIN + 2))


def test_goodput_is_what_nodes_send_over_twice_the_links_of_a_tree_and_load_is_its_part_of_a_rate():
    status = job()
    frame = frame_of(status)
    assert frame.goodput == pytest.approx(9 * 8e6 / 16, rel=1e-3)
    tree = status.policy.trees[0]
    child = next(rank for rank, parent in enumerate(tree.reduce_parent) if parent >= 0)
    (link,) = [
        link for link in frame.links if (link.source, link.target) == (child, tree.reduce_parent[child])
    ]
    used = sum(
        each.share
        for each in status.policy.trees
        for pair in [
            *enumerate(each.reduce_parent),
            *((up, at) for at, up in enumerate(each.broadcast_parent)),
        ]
        if pair == (child, tree.reduce_parent[child])
    )
    assert link.rate is not None
    assert link.load == pytest.approx(used * 4.5e6 / link.rate, rel=0.01)
    assert set(link.marks) == {"m", "t"}


def test_the_bound_is_the_optimum_of_the_measured_links():
    status = job()
    fast = [replace(link, rate=80e6) for link in status.links]
    history = History()
    (point,) = history.add(replace(status, links=tuple(fast))).points
    # Every node can take in at most all its links together, and nothing goes beyond the fewest.
    fewest = min(sum(link.target == rank for link in status.links) for rank in range(9))
    assert point.bound is not None
    assert 80e6 / 2 <= point.bound <= fewest * 80e6
    assert History().add(replace(status, links=())).points[0].bound is None


def test_of_a_full_mesh_of_512_nodes_the_links_in_trees_and_the_slowest_are_shown():
    status = large_job(512, time=BEGIN)
    link = status.links[0]
    mesh = tuple(
        replace(link, source=source, target=target, rate=1e8 + source)
        for source in range(512)
        for target in range(512)
        if source != target and (source + target) % 8 == 0
    )
    frame = frame_of(replace(status, links=mesh))
    shown = {(each.source, each.target) for each in frame.links}
    assert len(shown) == 1500
    assert frame.all_links == len(mesh)
    for tree in status.policy.trees:
        assert {(rank, up) for rank, up in enumerate(tree.reduce_parent) if up >= 0} <= shown


def test_a_long_job_s_curve_stays_short_and_keeps_the_slow_rounds():
    history = History()
    slow = 7.0
    for second in range(5000):
        status = job(BEGIN + second, links=())
        if second == 100:
            status = replace(status, nodes=(replace(status.nodes[0], round_s=slow), *status.nodes[1:]))
        history.add(status)
    assert 1000 <= len(history.points) <= 2000
    assert max(point.round_s or 0 for point in history.points) == slow
    assert history.points[-1].time >= BEGIN + 4990


def test_trees_come_once_a_policy_and_whoever_comes_later_gets_all():
    history = History()
    first, second = history.add(job()), history.add(job(BEGIN + 1))
    assert (len(first.policies), len(second.policies)) == (1, 0)
    everything = history.everything()
    assert everything.reset
    assert [policy.version for policy in everything.policies] == [1]
    assert len(everything.points) == 2
