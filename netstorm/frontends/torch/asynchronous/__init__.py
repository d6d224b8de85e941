"""Asynchronous training: ranks push gradients to owners, which apply each at once, and pull parameters.

`AsynchronousSGD` is SGD on owners, with delay compensation (DCASGD). No rank waits for another one.
`MixedSync` is the same between sites, whose ranks stay in step.
"""

from __future__ import annotations

from netstorm.frontends.torch.asynchronous.mixed_sync import MixedSync
from netstorm.frontends.torch.asynchronous.sgd import AsynchronousSGD

__all__ = ["AsynchronousSGD", "MixedSync"]
