"""What the wheel and the source distribution hold, built from the files of this checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.forking import ROOT

pytestmark = pytest.mark.slow
FOLDERS = (
    "benchmarks",
    "constraints",
    "deploy",
    "docs",
    "examples",
    "netstorm",
    "scripts",
    "tests",
    "typings",
)
FILES = ("LICENSE", "MANIFEST.in", "README.md", "CHANGELOG.md", "mkdocs.yml", "pyproject.toml", "setup.py")
BUILD = "import sys, setuptools.build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy: building leaves files."""
    copy: Path = tmp_path_factory.mktemp("checkout") / "netstorm"
    copy.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


def built(checkout: Path, what: str) -> Path:
    words = [sys.executable, "-c", BUILD, what, str(checkout / "dist")]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return checkout / "dist" / done.stdout.splitlines()[-1]


def below(folder: str) -> set[str]:
    paths = (ROOT / folder).rglob("*")
    files = {str(path.relative_to(ROOT)) for path in paths if path.is_file() and not path.is_symlink()}
    return {name for name in files if "__pycache__" not in name}


def test_a_wheel_holds_all_that_a_job_and_the_demo_need_and_networks_to_begin_with(checkout: Path) -> None:
    with zipfile.ZipFile(built(checkout, "build_wheel")) as wheel:
        names = set(wheel.namelist())
    assert below("netstorm") <= names
    networks = {name.rpartition("/")[2] for name in names if "/share/netstorm/networks/" in name}
    assert networks == {name.rpartition("/")[2] for name in below("examples/networks")}


def test_a_source_distribution_holds_examples_pages_and_templates(checkout: Path) -> None:
    with tarfile.open(built(checkout, "build_sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("netstorm", "examples", "deploy", "docs"):
        assert below(folder) <= names


def test_an_editable_install_is_found_beside_a_clone_named_as_the_package(
    checkout: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(built(checkout, "build_editable")) as wheel:
        wheel.extractall(tmp_path)
    script = f"import site; site.addsitedir({str(tmp_path)!r}); import netstorm; print(netstorm.__version__)"
    words = [sys.executable, "-S", "-c", script]
    done = subprocess.run(
        words, cwd=checkout.parent, env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
