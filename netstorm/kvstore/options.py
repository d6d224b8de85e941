"""What a general node must know before it joins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.protocol.messages import Join
from netstorm.pslite.measurement.link_meter import MeterOptions
from netstorm.settings import JOB_WIDE, Settings, declarations

__all__ = ["NodeOptions", "given", "meter_options"]

_ELEMENT: Final = 4
"""Bytes of a float32: PROBE_CHUNK_SIZE counts elements, a link bytes."""


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
    link_retry_s: float = 30.0
    meter: MeterOptions | None = None
    """How links are measured; None: not at all."""
    auxiliary: AuxiliaryOptions = field(default_factory=AuxiliaryOptions)

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


def given(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the job-wide settings that this process was given explicitly, by variable."""
    return tuple(
        (declarations()[name].variable, str(getattr(settings, name)))
        for name in JOB_WIDE
        if settings.sources.get(name, "default") != "default"
    )


def meter_options(settings: Settings) -> MeterOptions | None:
    """Return how these settings want links to be measured; None: not at all."""
    if not settings.awareness:
        return None
    elements = settings.probe_chunk_size or settings.chunk_size // 4
    return MeterOptions(
        estimator=settings.estimator,
        chunk_bytes=max(1, elements * _ELEMENT),
        chunks=settings.probe_chunk_num,
    )
