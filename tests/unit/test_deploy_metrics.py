"""What `deploy` has for Prometheus and Grafana names metrics and labels that a scheduler serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from netstorm.lab.testing.watched_job import large_job
from netstorm.scheduler.build_status import metrics_of_several

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
BOARD = DEPLOY / "grafana" / "netstorm.json"

_NAME = re.compile(r"\b(?:netstorm|process)_[a-z_]+\b|\bup\b")
_LABEL = re.compile(r"(\w+)(?:=~|!=|=)\"")
_FROM_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus itself gives."""


def served() -> dict[str, set[str]]:
    """Return the labels of each metric that a scheduler serves, by its name."""
    status = msgspec.structs.replace(large_job(3, time=1.0), counters={"policies": 1.0})

    class Once:
        def collect(self):
            return metrics_of_several([status], {"policies": 1.0})

    registry = CollectorRegistry()
    registry.register(Once())
    ProcessCollector(registry=registry)
    text = generate_latest(registry).decode()
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    rules = [
        rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    board = json.loads(BOARD.read_text())
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [
        each["query"]["query"] for each in board["templating"]["list"] if isinstance(each["query"], dict)
    ]
    return [*rules, *panels, *variables, *(each["expr"] for each in board["annotations"]["list"])]


def test_every_metric_and_label_that_is_named_is_served():
    known = served()
    for expression in expressions():
        names = _NAME.findall(expression)
        assert names, expression
        for name in names:
            assert name in known, f"{expression}: no metric {name}"
        labels = set(_LABEL.findall(expression)) - _FROM_PROMETHEUS
        assert labels <= set().union(*(known[name] for name in names)), expression


def test_every_label_in_a_legend_is_one_of_its_metric():
    known = served()
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel["targets"]:
            names = _NAME.findall(target["expr"])
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= set().union(*(known[name] for name in names)), target


def test_panels_lie_side_by_side_and_have_numbers_of_their_own():
    taken: set[tuple[int, int]] = set()
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus is not installed")
def test_prometheus_takes_the_rules():
    words = ["promtool", "check", "rules", str(ALERTS)]
    checked = subprocess.run(words, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
