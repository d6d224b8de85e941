"""Sums of gradients that overlap with the next forward pass: each module waits for its own alone (P3)."""

from __future__ import annotations

from netstorm.frontends.torch.scheduled_optimizer.optimizer import ScheduledOptimizer

__all__ = ["ScheduledOptimizer"]
