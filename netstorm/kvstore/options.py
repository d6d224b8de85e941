"""What a general node must know before it joins."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.protocol.messages import Join

__all__ = ["NodeOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Who a node is, where the scheduler is, and how patient to be."""

    scheduler_host: str
    scheduler_port: int
    host: str
    """Address that others can reach this node at."""
    port: int
    job: str = "default"
    site: str = ""
    asked_rank: int = -1
    num_workers: int = 1
    release: str = ""
    pid: int = 0
    must_agree: tuple[tuple[str, str], ...] = ()
    """Job-wide settings given explicitly: (variable, value)."""
    join_timeout_s: float = 300.0
    wait_timeout_s: float = 3600.0

    def join(self) -> Join:
        """Return the message that asks the scheduler for a place."""
        return Join(
            asked_rank=self.asked_rank,
            num_workers=self.num_workers,
            host=self.host,
            port=self.port,
            site=self.site,
            release=self.release,
            pid=self.pid,
            must_agree=dict(self.must_agree),
        )

    def scheduler_name(self) -> str:
        """Return the scheduler as error messages name it."""
        return f"the scheduler at {self.scheduler_host}:{self.scheduler_port}"
