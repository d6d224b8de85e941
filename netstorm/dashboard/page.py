"""The files of the page; and a report, which is the same page in one file, with a recording inside."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from netstorm.dashboard.recording import JobRecord

__all__ = ["POLICY", "STATIC", "report"]

STATIC: Final = Path(str(files("netstorm.dashboard") / "static"))

POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content-Security-Policy of the served page: what slips in as HTML neither runs nor loads anything."""

_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT: Final = re.compile(r'<script src="([a-z]+\.js)"></script>')
_ICON: Final = '<link rel="icon" href="icon.svg">'
_HEAD: Final = '<meta charset="utf-8">'


def report(records: Mapping[str, JobRecord]) -> str:
    """Return the page with the recorded jobs inside. It asks for nothing else, and runs no other script."""
    hashes = []

    def inlined(match: re.Match[str]) -> str:
        kind = "style" if match[1].endswith(".css") else "script"
        text = (STATIC / match[1]).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes.append(f"{kind}-src 'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    # No text of a job can end the element that it stands in: JSON needs no <.
    data = msgspec.json.encode(records).decode().replace("<", "\\u003c")
    page = (
        (STATIC / "index.html").read_text(encoding="utf-8").replace(_ICON, '<link rel="icon" href="data:,">')
    )
    page = _SCRIPT.sub(inlined, _STYLE.sub(inlined, page))
    sources: dict[str, list[str]] = {}
    for entry in hashes:
        name, source = entry.split(" ")
        sources.setdefault(name, []).append(source)
    allowed = "; ".join(f"{name} {' '.join(values)}" for name, values in sources.items())
    policy = f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; {allowed}"
    element = f'<script type="application/json" id="recording">{data}</script>'
    page = page.replace(_HEAD, f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    return page.replace("<!-- recording -->", element, 1)
