"""Options come from the settings."""

from __future__ import annotations

import pytest

from netstorm.protocol.codecs import ChunkSizes
from netstorm.scheduler.options import SchedulerOptions
from netstorm.settings import Settings


def test_options_come_from_the_settings_with_all_that_nodes_may_have_to_agree_on():
    settings = Settings(num_workers=7, chunk_size=500, job="j", wait_timeout_s=9.0)
    options = SchedulerOptions.from_settings(settings, release="1")
    assert (options.num_workers, options.job) == (7, "j")
    assert (options.chunks, options.local_chunks) == (
        ChunkSizes(500, 1000, 256, 2**23),
        ChunkSizes(500, 8000, 4, 2**23),
    )
    assert options.wait_timeout_s == 9.0
    assert options.job_wide["CHUNK_SIZE"] == "500"
    assert options.job_wide["NUM_ROOT_SERVERS"] == "0"


@pytest.mark.parametrize(
    ("given", "elsewhere", "on_one_machine"),
    [
        ({}, 65_536, 16 * 32_768),
        ({"chunk_size": 1000}, 2000, 16_000),
        ({"largest_chunk": 70_000}, 70_000, 70_000),
        ({"network_file": "wan.yaml"}, 65_536, 65_536),
        ({"max_message_bytes": 8 * 40_000}, 40_000, 40_000),
    ],
)
def test_chunks_of_large_keys_grow_and_more_so_on_one_machine(given, elsewhere, on_one_machine):
    options = SchedulerOptions.from_settings(Settings(num_workers=2, **given), release="1")
    assert (options.chunks.largest, options.local_chunks.largest) == (elsewhere, on_one_machine)


@pytest.mark.parametrize(
    ("nodes", "processors", "chunks"), [(3, 2, 2), (3, 8, 3), (9, 8, 4), (9, 1, 2), (1, 4, 2)]
)
def test_on_one_machine_a_large_key_has_as_many_chunks_as_are_added_up_at_once(nodes, processors, chunks):
    settings = Settings(num_workers=nodes)
    options = SchedulerOptions.from_settings(settings, release="1", processors=processors)
    assert -(-1_000_000 // options.local_chunks.of(1_000_000)) == chunks
