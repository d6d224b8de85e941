"""A job's status for a terminal. Names that nodes report are shown as plain text, without markup."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netstorm.addresses import host_port
from netstorm.cli.support import size_text, time_text
from netstorm.scheduler.bound import Bound
from netstorm.scheduler.status import JobStatus, LinkStatus, NodeView, ViewStatus, tree_traffic
from netstorm.topology.tree import children_of
from netstorm.units import format_rate

__all__ = ["view"]

T = TypeVar("T")

_MOST_TREES: Final = 6
_MOST_FORMER: Final = 4
_MOST_LINKS: Final = 12
"""Links listed if there is no room for a matrix: the slowest."""
_MOST_NODES: Final = 32
_CELL: Final = 7
"""Width of a matrix's column."""
_LABEL: Final = 12
_UNKNOWN: Final = "·"
_CONTENDED: Final = "links carry less under contention"
_ROUTED: Final = "~"
_OLD_S: Final = 30.0
"""Age from which a measurement is shown dim."""
_SILENT_S: Final = 3.0
_MOST_CHANGES: Final = 5
"""Changes of the view that are listed."""
_MOST_FAILED: Final = 12
_PHASES: Final = {"running": "bold green", "failed": "bold red", "gathering": "bold yellow"}


def view(status: JobStatus, width: int, bound: Bound | None = None) -> RenderableType:
    """Return the whole view, the most important parts first: a screen may be too small for the rest.

    Args:
        status: of the job.
        width: of the terminal, in columns.
        bound: what no round can be faster than; None: not known.
    """
    known = [] if bound is None else [Text.assemble(("bound ", "dim"), str(bound))]
    parts: list[RenderableType] = [
        *_head(status),
        *known,
        Text(""),
        *_nodes(status.nodes[:_MOST_NODES], width),
    ]
    if len(status.nodes) > _MOST_NODES:
        parts.append(Text(f"and {len(status.nodes) - _MOST_NODES} more nodes", "dim"))
    parts += [Text(""), *_trees(status), *_compression(status)]
    if any(link.measured for link in status.links):
        parts += [Text(""), *_links(status, width)]
    parts += _former(status)
    return Group(*parts)


def _head(status: JobStatus) -> Iterator[Text]:
    yield Text.assemble(
        ("job ", "dim"),
        (status.job, "bold"),
        "  ",
        (status.phase, _PHASES.get(status.phase, "bold")),
        f"  {len(status.nodes)} of {status.num_workers} nodes"
        if status.phase == "gathering"
        else f"  {sum(node.state != 'left' for node in status.nodes)} nodes",
        f", {status.keys.count} keys, {size_text(status.keys.bytes)}" if status.keys.count else "",
        f", up {_ago(status.age_s)}",
        "" if status.cost_an_hour is None else f", traffic costs {status.cost_an_hour:.3g} an hour",
        f", plans with {status.link_share:.0%} of each link" if status.link_share < 1 else "",
        (f"   scheduler {status.scheduler}, this at {status.http}", "dim"),
        overflow="ellipsis",
        no_wrap=True,
    )
    others = [f"{one.job} ({one.phase})" for one in status.jobs if one.job != status.job]
    if others:
        yield Text.assemble(("other jobs here: ", "dim"), ", ".join(others))
    if status.phase in {"failed", "gathering"}:
        yield Text(status.text, "red" if status.phase == "failed" else "yellow")
    if status.failed_links:
        links = ", ".join(
            f"{one.source}→{one.target} ({_ago(one.since_s)})" for one in status.failed_links[:_MOST_FAILED]
        )
        more = len(status.failed_links) - _MOST_FAILED
        yield Text(f"links that have failed: {links}" + (f" and {more} more" if more > 0 else ""), "red")
    if status.view is not None:
        yield from _view_lines(status.view)
    policy = status.policy
    yield Text.assemble(
        ("policy ", "dim"),
        (f"{policy.version}", "bold"),
        (" for ", "dim"),
        _ago(policy.since_s),
        (": ", "dim"),
        policy.reason or "no reason given",
    )
    if policy.considered and policy.considered not in policy.reason:
        yield Text.assemble(("since then: ", "dim"), policy.considered)


def _view_lines(view: ViewStatus) -> Iterator[Text]:
    silent = f", ranks {', '.join(map(str, view.silent))} fetch the state" if view.silent else ""
    yield Text.assemble(
        ("view ", "dim"), (f"{view.number}", "bold"), f" of {view.fewest} to {view.most} nodes{silent}"
    )
    if view.waiting:
        yield Text(view.waiting, "yellow")
    for change in view.changes[:_MOST_CHANGES]:
        yield Text(f"  view {change.view}, {_ago(change.ago_s)} ago: {change.text}", "dim")


def _nodes(nodes: Sequence[NodeView], width: int) -> Iterator[RenderableType]:
    """Show the nodes: as many columns as have room whole, and what ranks wait for on lines of their own where
    it has none.
    """
    columns = [column for column in _COLUMNS if column.heading != "site" or any(node.site for node in nodes)]
    cells = {column.heading: [column.cell(node) for node in nodes] for column in columns}
    needed = {
        heading: _GAP + max(cell_len(heading), *(text.cell_len for text in texts), 0)
        for heading, texts in cells.items()
    }
    for heading in _DROPPED_FIRST:
        if sum(needed.values()) > width:
            needed.pop(heading, None)
    waits = [(node, _doing(node)) for node in nodes]
    room = width - sum(needed.values())
    beside = all(text.cell_len <= room for _, text in waits)
    table = _table()
    for column in columns:
        if column.heading in needed:
            justify: Literal["left", "right"] = "left" if column.left else "right"
            table.add_column(column.heading, justify=justify, no_wrap=True, header_style="dim")
    if beside:
        table.add_column("waits for", no_wrap=True, header_style="dim")
    for number, (_, text) in enumerate(waits):
        table.add_row(*(cells[heading][number] for heading in needed), *([text] if beside else ()))
    yield table
    if not beside:
        yield Text("")
        for node, text in waits:
            if text:
                yield Text.assemble((f"rank {_rank(node)}: ", "dim"), text)


@dataclass(frozen=True, slots=True)
class _TableColumn:
    """One column of the table of nodes."""

    heading: str
    cell: Callable[[NodeView], Text]
    left: bool = False


_GAP: Final = 2
"""Columns of the terminal between two of the table."""

_COLUMNS: Final = (
    _TableColumn("rank", lambda node: Text(_rank(node))),
    _TableColumn("node", lambda node: Text(host_port(node.host, node.port)), left=True),
    _TableColumn("site", lambda node: Text(node.site or _UNKNOWN), left=True),
    _TableColumn("heard", lambda node: Text(_ago(node.heard_s), "bold red" if _is_silent(node) else "")),
    _TableColumn("round", lambda node: _or(node.last_round, str)),
    _TableColumn("took", lambda node: _or(node.round_s, time_text)),
    _TableColumn("waiting", lambda node: _or(node.waiting, "{:.0%}".format)),
    _TableColumn("sending", lambda node: _or(node.sending, _rate)),
    _TableColumn("sent", lambda node: _or(node.bytes_sent, size_text)),
    _TableColumn("clock", lambda node: Text(_clock(node))),
)
_DROPPED_FIRST: Final = ("clock", "sent", "site", "heard", "node", "sending", "waiting")
"""The columns that a narrow terminal can do without, from the least important one on."""

_DEEPEST: Final = 100
"""Levels of a tree that are shown: a line has no room for more."""


def _rank(node: NodeView) -> str:
    return "any" if node.rank is None else str(node.rank)


def _is_silent(node: NodeView) -> bool:
    return node.heard_s >= _SILENT_S and node.state != "left"


def _doing(node: NodeView) -> Text:
    """Return what a node waits for, or what it is instead of running."""
    if node.busy_s:
        return Text(f"alive, but its Python has not run for {_ago(node.busy_s)}", "bold yellow")
    return Text(node.waits_for or ("" if node.state == "running" else node.state))


def _trees(status: JobStatus) -> Iterator[Text]:
    trees = sorted(status.policy.trees, key=lambda tree: (-tree.share, tree.root))
    yield Text("trees: their share of the data; the root, and in brackets who sends to it", "dim")
    for tree in trees[:_MOST_TREES]:
        up = _brackets(tree.root, children_of(tree.reduce_parent))
        down = _brackets(tree.root, children_of(tree.broadcast_parent))
        text = up if up == down else f"{up}   and down again {down}"
        yield Text(f"{tree.share:6.1%}  {text}", overflow="ellipsis", no_wrap=True)
    if len(trees) > _MOST_TREES:
        rest = trees[_MOST_TREES:]
        yield Text(f"and {len(rest)} more with {sum(tree.share for tree in rest):.1%} together", "dim")
    detours = status.policy.detours
    if detours:
        chunks = sum(node.detoured or 0 for node in status.nodes)
        exploring = sum(1 for detour in detours if detour.explore)
        counts = f"{len(detours)} auxiliary paths, {exploring} of them to explore; {chunks} chunks so far"
        paths = "  ".join(">".join(map(str, detour.path)) for detour in detours)
        yield Text.assemble((f"{counts}:  ", "dim"), paths, overflow="ellipsis", no_wrap=True)


def _compression(status: JobStatus) -> Iterator[Text]:
    """Show how gradients travel, once for all nodes that say the same."""
    texts = {node.compression for node in status.nodes if node.compression}
    for text in sorted(texts):
        yield Text.assemble(("compression:  ", "dim"), text)


def _brackets(rank: int, children: Sequence[Sequence[int]], depth: int = 0) -> str:
    if depth > _DEEPEST:
        return "…"
    below = " ".join(_brackets(child, children, depth + 1) for child in children[rank])
    return f"{rank}({below})" if below else str(rank)


def _links(status: JobStatus, width: int) -> Iterator[RenderableType]:
    size = len(status.nodes)
    measured = [link for link in status.links if link.measured and link.rate]
    count = f"{len(measured)} of {len(status.links)} measured"
    routed = set(status.routed_pairs)
    routed_text = f"{len(routed)} pairs that are routed past other nodes" if routed else ""
    used = tree_traffic(status.policy.trees)
    if _LABEL + (size + 2) * _CELL > width:
        besides = (f", beside {routed_text}" if routed_text else "") + (
            f"; {_CONTENDED}" if status.crowded else ""
        )
        yield Text(f"links: {count}{besides}; the slowest, Mbit/s", "dim")
        slowest = sorted(measured, key=lambda link: link.rate or 0.0)[:_MOST_LINKS]
        yield Text("  ".join(f"{link.source}>{link.target} {_mbit(link.rate)}" for link in slowest))
        return
    yield Text(
        f"links, Mbit/s from (rows) to (columns): {count}; green: in a tree; ≥: an access line was the limit"
        + (f"; {_ROUTED}: {routed_text}" if routed_text else "")
        + (f"; {_CONTENDED}" if status.crowded else ""),
        "dim",
    )
    table = _table()
    table.add_column("", no_wrap=True)
    for target in range(size):
        table.add_column(str(target), justify="right", no_wrap=True, header_style="dim")
    for heading in ("all out", "all in"):
        table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
    by_ends = {(link.source, link.target): link for link in measured}
    for source, node in enumerate(status.nodes):
        cells = [
            Text(_ROUTED, "dim")
            if (source, target) in routed
            else _link(by_ends.get((source, target)), used=(source, target) in used)
            for target in range(size)
        ]
        caps = (_or(node.egress, _mbit), _or(node.ingress, _mbit))
        table.add_row(Text(f"{source} {node.site}".rstrip()[:_LABEL], "dim"), *cells, *caps)
    yield table


def _link(link: LinkStatus | None, *, used: bool) -> Text:
    if link is None:
        return Text(_UNKNOWN, "green dim" if used else "dim")
    old = link.age_s is not None and link.age_s > _OLD_S
    style = ("green" if used else "") + (" dim" if old else "")
    return Text(("≥" if link.censored else "") + _mbit(link.rate), style.strip())


def _former(status: JobStatus) -> list[RenderableType]:
    if not status.former:
        return []
    parts: list[RenderableType] = [Text(""), Text("former policies", "dim")]
    for one in status.former[:_MOST_FORMER]:
        text = f"{one.version:4}  ended {_ago(one.ended_s)} ago after {_ago(one.lasted_s)}: {one.reason}"
        parts.append(Text(text, overflow="ellipsis", no_wrap=True))
    return parts


def _table() -> Table:
    return Table(box=None, pad_edge=False, show_edge=False, padding=(0, _GAP, 0, 0))


def _or(value: T | None, show: Callable[[T], str]) -> Text:
    return Text(_UNKNOWN if value is None else show(value))


def _clock(node: NodeView) -> str:
    """Return the offset and drift of the cluster clock against the host's."""
    if node.clock_offset_s is None:
        return _UNKNOWN
    ms = 1e3 * node.clock_offset_s
    offset = f"{ms:+.2f}ms" if abs(ms) < 100 else f"{node.clock_offset_s:+.3g}s"
    return f"{offset} {1e6 * node.clock_drift:+.0f}ppm" if node.clock_drift else offset


def _rate(bit_per_s: float) -> str:
    return format_rate(float(f"{bit_per_s:.3g}"))


def _mbit(bit_per_s: float | None) -> str:
    if not bit_per_s:
        return _UNKNOWN
    mbit = bit_per_s / 1e6
    return f"{mbit:.0f}" if mbit >= 10 else f"{mbit:.2g}"


def _ago(seconds: float) -> str:
    """Return an elapsed time; from a minute on as minutes and seconds."""
    if not math.isfinite(seconds):
        return _UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{whole}s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
