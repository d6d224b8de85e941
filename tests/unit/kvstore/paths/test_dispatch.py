"""Which way chunks take, and when: links are described by hand."""

from __future__ import annotations

import pytest

from netstorm.kvstore.paths.dispatch import MAX_IN_FLIGHT, AuxiliaryOptions, Dispatch, part_id
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Part
from netstorm.pslite.machine import LinkState, Send
from netstorm.topology.policy import Detour
from tests.unit.kvstore.rounds.ranks import legal_part

CHUNK = 100_000 - 64
"""Bytes; with its header, about 0.1 s at 1 MB/s."""
FAST = (80e6, 0.001)
SLOW = (8e5, 0.001)
OVER_1 = Detour(path=(0, 1, 9), links=(FAST, FAST))
OVER_2 = Detour(path=(0, 2, 9), links=(FAST, SLOW))


def send(chunk, to=9, round=0):
    part = legal_part(round=round, chunk=chunk)
    return Send(peer=Peer(to), message=part, payload=bytes(CHUNK), order=(0, round, chunk))


def link(waiting=0, *, rate=1e6, window=400_000, latency_s=0.0):
    """Return a link on which so many chunks are under way."""
    return LinkState(messages=waiting, bytes=100_000 * waiting, window=window, rate=rate, latency_s=latency_s)


class World:
    """A dispatch, and links that carry nothing unless set."""

    def __init__(self, links=None, **options):
        self.counters = Counters()
        self.dispatch = Dispatch(AuxiliaryOptions(**options), self.counters)
        self.links = {9: link(), **(links or {})}
        self.now = 0.0

    def enqueue(self, *chunks, detours=(OVER_1,), to=9):
        for chunk in chunks:
            self.dispatch.enqueue(send(chunk, to), detours)

    def run(self):
        """Return (next node, chunk) of what goes now."""
        sent = list(self.dispatch.run(lambda peer: self.links.get(int(peer), LinkState()), self.now))
        return [(int(one.peer), part.chunk) for one in sent if isinstance(part := one.message, Part)]

    def arrived(self, chunk, detour=OVER_1):
        self.dispatch.record_arrival(detour.path, part_id(send(chunk).message), self.now)


def test_without_detours_a_link_gets_what_fits_its_window_in_the_order_of_the_job():
    world = World()
    world.enqueue(3, 1, 5, 2, 4, 0, detours=())
    assert world.run() == [(9, 0), (9, 1), (9, 2), (9, 3)]
    assert world.dispatch.backlogs
    world.links[9] = link(3)
    assert world.run() == [(9, 4)]
    world.links[9] = link(0)
    assert world.run() == [(9, 5)]
    assert not world.dispatch.backlogs


def test_a_chunk_takes_a_detour_if_its_turn_on_the_link_would_come_clearly_later():
    world = World({9: link(12)})
    world.enqueue(0, 1, 2)
    assert world.run() == [(1, 0), (1, 1), (1, 2)]
    assert world.counters.snapshot()["detoured"] == 3


def test_a_detoured_part_carries_its_path():
    world = World({9: link(12)})
    world.enqueue(0)
    (sent,) = world.dispatch.run(lambda peer: world.links.get(int(peer), LinkState()), 0.0)
    assert isinstance(sent.message, Part)
    assert (sent.message.is_aux, sent.message.path, sent.message.hop) == (True, (0, 1, 9), 1)


def test_what_is_as_fast_on_the_link_stays_there():
    world = World({9: link(0, rate=1e8)})
    world.enqueue(0, 1, 2)
    assert world.run() == [(9, 0), (9, 1), (9, 2)]


def test_the_first_chunks_go_over_the_link_and_the_first_that_gains_takes_the_detour():
    slower = Detour(path=(0, 1, 9), links=((80e6, 0.0), (80e6, 0.25)))
    world = World()
    world.enqueue(*range(14), detours=(slower,))
    # chunk k arrives after (k + 1) 0.1 s on the link, and after 0.27 s over the detour
    assert world.run()[0] == (1, 3)


def test_a_few_chunks_are_not_worth_a_detour():
    world = World({9: link(3)})
    world.enqueue(*range(8))
    assert world.run() == [(9, 0)]


def test_nothing_is_known_of_a_link_that_was_never_busy_so_it_is_taken():
    world = World({9: link(3, rate=0.0)})
    world.enqueue(0, 1)
    assert world.run() == [(9, 0)]


def test_only_so_many_chunks_are_on_a_path_until_its_end_confirms_them():
    world = World({9: link(400)})
    world.enqueue(*range(10))
    assert world.run() == [(1, chunk) for chunk in range(MAX_IN_FLIGHT)]
    assert world.run() == []
    world.arrived(2)
    assert world.run() == [(1, MAX_IN_FLIGHT)]


def test_an_unexpected_confirmation_is_counted_and_frees_no_place_on_the_path():
    world = World({9: link(400)})
    world.enqueue(*range(10))
    world.run()
    world.arrived(7)
    world.arrived(0)
    world.arrived(0)
    assert world.counters.snapshot()["credits_unasked"] == 2
    assert world.run() == [(1, MAX_IN_FLIGHT)]


def test_a_path_that_proves_slow_is_left_alone_for_a_while():
    world = World({9: link(12)})
    world.enqueue(0)
    assert world.run() == [(1, 0)]
    world.now = 5.0
    world.arrived(0)
    world.enqueue(1)
    assert world.run() == []
    world.now = 20.0
    assert world.run() == [(1, 1)]


def test_the_detour_that_is_expected_to_be_faster_is_taken():
    world = World({9: link(20)})
    world.enqueue(0, detours=(OVER_2, OVER_1))
    assert world.run() == [(1, 0)]


def test_what_waits_for_the_first_link_of_a_detour_counts():
    world = World({9: link(12), 1: link(12)})
    world.enqueue(0)
    assert world.run() == []
    world = World({9: link(12), 1: link(2)})
    world.enqueue(*range(10), to=1, detours=())  # they wait for the same link
    world.enqueue(100)
    assert (1, 100) not in world.run()


def test_links_on_the_way_that_carry_trees_too_make_a_detour_slower():
    loaded = Detour(path=(0, 1, 9), links=(FAST, FAST), load=0.9)
    world = World({9: link(12)})
    world.enqueue(0, detours=(loaded,))
    assert world.run() == []


@pytest.mark.parametrize(
    ("on_link", "on_first", "expected"),
    [(2, 0, [(9, 0)]), (3, 0, [(1, 0)]), (3, 1, [(9, 0)]), (4, 1, [])],
)
def test_the_papers_rule_counts_chunks(on_link, on_first, expected):
    world = World({9: link(on_link), 1: link(on_first)}, rule="queue", busy_bound=2, queue_length=1)
    world.enqueue(0)
    assert world.run() == expected


def test_the_papers_rule_tries_paths_in_turn():
    world = World({9: link(3)}, rule="queue", queue_length=1)
    world.enqueue(0, 1, 2, detours=(OVER_1, OVER_2))
    assert world.run() == [(1, 0), (2, 1), (9, 2)]


def test_a_share_of_the_chunks_goes_over_links_that_are_to_be_measured_one_at_a_time():
    unseen = Detour(path=(0, 5, 9), links=(SLOW, SLOW), explore=True)
    world = World(explore_share=0.1)
    taken = []
    for chunk in range(100):
        world.enqueue(chunk, detours=(unseen,))
        gone = world.run()
        taken += [chunk for to, chunk in gone if to == 5]
        assert len(gone) == 1
        if len(taken) == 1 and chunk == 50:
            world.arrived(taken[0], unseen)
    assert len(taken) == 2
    assert world.counters.snapshot()["explored"] == 2


def test_what_is_relayed_waits_in_its_place_and_takes_no_detour():
    world = World({9: link(12)})
    world.enqueue(1)
    world.dispatch.enqueue(send(0))
    world.dispatch.enqueue(send(2))
    assert world.run() == [(1, 1)]
    world.links[9] = link(2)
    assert world.run() == [(9, 0), (9, 2)]


def test_links_that_are_to_be_measured_take_turns():
    unseen = tuple(Detour(path=(0, n, 9), links=(FAST, FAST), explore=True) for n in (3, 4, 5))
    world = World(explore_share=0.1)
    taken = []
    for chunk in range(72):
        world.enqueue(chunk, detours=unseen)
        ((to, _),) = world.run()
        if to != 9:
            taken.append(to)
            world.arrived(chunk, unseen[to - 3])
    # Six in a row, which make an estimate; until all have had that, five times the share.
    assert taken == [3] * 6 + [4] * 6 + [5] * 6 + [3] * 3


def looking(links, **fields):
    return Detour(path=(0, 5, 9), links=links, explore=True, **fields)


def test_a_look_takes_the_first_chunk_whose_turn_is_clearly_later():
    slower = looking(((80e6, 0.0), (80e6, 0.25)))
    world = World(explore_share=0.5)
    world.enqueue(*range(14), detours=(slower,))
    # Chunk k arrives after (k + 1) 0.1 s on the link, and after 0.27 s on the path.
    assert world.run()[0] == (5, 3)


def test_six_chunks_may_be_late_to_see_a_link_and_no_others_for_a_while():
    slow = looking((SLOW, SLOW))
    world, late = World(explore_share=1.0), []
    for chunk in range(400):
        world.now += 0.1
        world.enqueue(chunk, detours=(slow,))
        for to, which in world.run():
            if to == 5:
                late.append(round(world.now, 1))
                world.arrived(which, slow)
    assert late[:6] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert len(late) == 8  # and one each half minute
    assert late[7] - late[6] == pytest.approx(30.0, abs=0.2)


def test_a_link_that_was_measured_once_is_not_worth_a_late_chunk():
    known = looking((SLOW, SLOW), again=True)
    world, late = World(explore_share=1.0), 0
    for chunk in range(100):
        world.now += 0.1
        world.enqueue(chunk, detours=(known,))
        for to, which in world.run():
            if to == 5:
                late += 1
                world.arrived(which, known)
    assert late == 1
