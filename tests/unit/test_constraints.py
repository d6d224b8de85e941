"""The files of dependencies with hashes are in agreement with what the package says that it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
RENEW = "run scripts/constraints.sh"

tomllib: Any = pytest.importorskip("tomllib", reason="pyproject.toml is read with Python 3.11's module")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
PYTHONS = [
    {**LINUX, "python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9"} for minor in (10, 11, 12)
]


def pins(extra: str) -> list[tuple[Requirement, list[str]]]:
    """Return the requirements of a file, each with the hashes of its release's files."""
    text = (ROOT / "constraints" / f"{extra}.txt").read_text().replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=")
        found.append((Requirement(requirement.strip()), [one.strip() for one in hashes]))
    return found


def name_of(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def applies(requirement: Requirement, python: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**python, "extra": ""})


@pytest.mark.parametrize("extra", ["torch", "mxnet"])
def test_every_dependency_is_pinned_to_one_release_that_the_package_allows(extra):
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    wanted += PROJECT["build-system"]["requires"]
    for python in PYTHONS:
        pinned = [pin for pin, _ in pins(extra) if applies(pin, python)]
        names = [name_of(pin) for pin in pinned]
        assert len(names) == len(set(names)), RENEW
        by_name = dict(zip(names, pinned, strict=True))
        for requirement in map(Requirement, wanted):
            if applies(requirement, python):
                (version,) = by_name[name_of(requirement)].specifier
                assert version.operator == "=="
                assert requirement.specifier.contains(version.version), f"{requirement}: {RENEW}"


@pytest.mark.parametrize("extra", ["torch", "mxnet"])
def test_every_pin_has_hashes(extra):
    for pin, hashes in pins(extra):
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), pin
