"""What nodes and the scheduler keep: bounded while a job runs, and nothing once it is quiet."""

from __future__ import annotations


def joined_nodes(chaos):
    """Return the nodes whose processes run and are in the job, by rank."""
    for rank, program in sorted(chaos.programs.items()):
        joined = program.node.machine.joined
        if program.running and joined is not None and chaos.cluster.is_member(program.node):
            yield rank, program, joined


def check_memory(chaos) -> None:
    """Check that what nodes keep for others is bounded: in a job without newcomers, results of few rounds."""
    job = chaos.job
    before, chaos.version_seen = chaos.version_seen, job.policy.version
    changed = chaos.version_seen != before
    if changed or job.silent or job.changing or any(chaos.at_risk.values()):
        chaos.quiet_from = 15 + max((program.step for program in chaos.programs.values()), default=0)
    quiet = all(program.step >= chaos.quiet_from for _, program, _ in joined_nodes(chaos))
    for rank, _, joined in joined_nodes(chaos):
        kept: dict[int, int] = {}
        for key, _, _ in joined.aggregation.views.kept:
            kept[key] = kept.get(key, 0) + 1
        for key, rounds in kept.items():
            known = joined.aggregation.keys[key]
            use = chaos.uses.get(known.name)
            # A result says what was complete when ranks contributed: as many rounds before as may be under
            # way, and as many may have come after it.
            most = 2 * known.rounds_under_way + 1 if use is None or use.rounds > 1 else 2
            if quiet:
                chaos.report.most_kept = max(chaos.report.most_kept, rounds)
                assert rounds <= most, (rank, known.name, rounds, most)


def check_leftovers(chaos) -> None:
    """Check that nothing is left of rounds once all programs have ended."""
    for rank, _, joined in joined_nodes(chaos):
        aggregation = joined.aggregation
        assert not aggregation.rounds, (rank, list(aggregation.rounds))
        assert not list(aggregation._waiting), rank
        early = aggregation.early.by_key
        assert not any(early.values()), (rank, early)
        assert not aggregation.views._expected, rank
        assert not aggregation.look_ahead._by_number, rank
        assert not aggregation.takeover._announced, rank
        assert not any(aggregation.moved.values()), rank
        assert not joined.state.providing.requests, rank
    tables = chaos.job._consistency._tables
    assert all(len(table.open) <= table.under_way for table in tables.values())
    assert not chaos.job.changing
