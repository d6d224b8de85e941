"""The options of a general node: what it must know before it joins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import netstorm
from netstorm.addresses import host_port
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions
from netstorm.protocol.messages import Join, LossTerms
from netstorm.pslite.datagram.lanes import LaneOptions
from netstorm.pslite.link_meter import MeterOptions
from netstorm.settings import JOB_WIDE, Settings, declarations

__all__ = ["NodeOptions", "explicit_job_settings", "lane_options", "loss_terms", "meter_options"]

_LARGEST_BOUND: Final = 0.99
"""For gradients all of which may be late, as with DMLC_K=0: something must count."""

_ELEMENT: Final = 4
"""Bytes of a float32: CHUNK_SIZE counts elements, a link bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Who a node is, where the scheduler is, and how long to wait."""

    scheduler_host: str
    scheduler_port: int
    host: str
    """Address that others can reach this node at."""
    port: int
    standbys: tuple[tuple[str, int], ...] = ()
    """Addresses of the schedulers that take over, in this order."""
    job: str = "default"
    site: str = ""
    asked_rank: int = -1
    num_workers: int = 1
    release: str = ""
    pid: int = 0
    framework: str = ""
    """Whose tensors the program sums; the same at all nodes of a job."""
    machine: int = 0
    """The same at all processes that reach each other over loopback; 0: unknown."""
    must_agree: tuple[tuple[str, str], ...] = ()
    """Job-wide settings given explicitly: (variable, value)."""
    join_timeout_s: float = 300.0
    wait_timeout_s: float = 3600.0
    link_timeout_s: float = 10.0
    link_retry_s: float = 30.0
    most_forwarded: int = 0
    """Bytes that wait to be forwarded for others; 0: `ForwardedBytes` decides."""
    connects_at_once: bool = False
    """To those to which it sends in trees, once it has joined; else with the first message to each."""
    meter: MeterOptions | None = None
    """How links are measured; None: not at all."""
    auxiliary: AuxiliaryOptions = field(default_factory=AuxiliaryOptions)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        scheduler: str,
        host: str,
        port: int,
        pid: int,
        framework: str = "",
        machine: int = 0,
        most_forwarded: int = 0,
        connects_at_once: bool = False,
    ) -> NodeOptions:
        """Return the options that the settings of a process ask for.

        Args:
            settings: of the process.
            scheduler: the scheduler's address, resolved.
            host: address that others can reach this node at.
            port: where this process listens; the settings may advertise another one.
            pid: of the process.
            framework: whose tensors the program sums.
            machine, most_forwarded, connects_at_once: see above.
        """
        return cls(
            scheduler_host=scheduler,
            scheduler_port=settings.scheduler_port,
            standbys=settings.standby_addresses,
            host=host,
            port=settings.advertised_port or port,
            job=settings.job,
            site=settings.site,
            asked_rank=settings.rank,
            num_workers=settings.num_workers,
            release=netstorm.__version__,
            pid=pid,
            framework=framework,
            machine=machine,
            most_forwarded=most_forwarded,
            connects_at_once=connects_at_once,
            must_agree=explicit_job_settings(settings),
            join_timeout_s=settings.join_timeout_s,
            wait_timeout_s=settings.wait_timeout_s,
            link_timeout_s=settings.link_timeout_s,
            link_retry_s=settings.link_retry_s,
            meter=meter_options(settings),
            auxiliary=AuxiliaryOptions.from_settings(settings),
        )

    def join(self) -> Join:
        """Return the message that asks the scheduler to join the job."""
        return Join(
            asked_rank=self.asked_rank,
            num_workers=self.num_workers,
            host=self.host,
            port=self.port,
            site=self.site,
            release=self.release,
            pid=self.pid,
            must_agree=dict(self.must_agree),
            framework=self.framework,
            machine=self.machine,
        )

    def scheduler_name(self) -> str:
        """Return the scheduler as error messages name it."""
        return f"the scheduler at {host_port(self.scheduler_host, self.scheduler_port)}"


def explicit_job_settings(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the job-wide settings that this process sets explicitly, as (variable, value)."""
    return tuple(
        (declarations()[name].variable, str(getattr(settings, name)))
        for name in JOB_WIDE
        if settings.sources.get(name, "default") != "default"
    )


def meter_options(settings: Settings) -> MeterOptions | None:
    """Return how the settings ask for links to be measured; None: not at all."""
    if not settings.awareness:
        return None
    return MeterOptions(
        estimator=settings.estimator,
        chunk_bytes=max(1, settings.probe_chunk_size or settings.chunk_size // 4 * _ELEMENT),
        chunks=settings.probe_chunk_num,
    )


def loss_terms(settings: Settings) -> LossTerms | None:
    """Return how late gradients are treated in a process's rounds; None: all are waited for."""
    bound = settings.loss_bound
    if settings.dgt and not bound:
        bound = min(1 - settings.dgt_important, _LARGEST_BOUND)
    if not bound:
        return None
    important = settings.dgt_important if settings.dgt else 0.0
    return LossTerms(
        bound=bound,
        deadline_s=settings.deadline_s,
        important=important,
        least=settings.dgt_least_important if settings.dgt and settings.dgt_adaptive else -1.0,
        newest=settings.dgt_newest,
    )


def lane_options(settings: Settings) -> LaneOptions | None:
    """Return how the settings ask for datagrams; None: not at all.

    ENABLE_DGT asks for them, too, as GeoMX's has UDP channels, but only between machines: within one, TCP is
    faster.
    """
    if not settings.datagrams and not settings.dgt:
        return None
    return LaneOptions(
        channels=settings.datagram_channels,
        explicit=settings.datagrams,
        block=settings.dgt_block,
        newest=settings.dgt_newest,
        info=settings.dgt_info,
    )
