"""PyTorch's frontend. Importing it registers the backend `netstorm` of `torch.distributed`.

PyTorch also finds the backend by itself (`autoload`), so a script need not import this to use it.
"""

from __future__ import annotations

from netstorm.frontends.torch.autoload import autoload

__all__ = ["autoload"]

autoload()
