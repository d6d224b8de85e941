"""Asynchronous operations on MXNet's dependency engine, and their errors."""

from __future__ import annotations

from netstorm.frontends.mxnet.engine import startup as startup  # prepares the engine when it is imported
