"""`python -m netstorm` is the `netstorm` command."""

from __future__ import annotations

from netstorm.cli.main import app

if __name__ == "__main__":
    app(prog_name="netstorm")
