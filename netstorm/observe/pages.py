"""The pages of a web server, by path, made when requested. One kind serves metrics to Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from netstorm.errors import NetStormError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["Application", "Page", "QueryPage", "metrics_page", "pages"]

_log = logging.getLogger(__name__)

Application: TypeAlias = "WSGIApplication"
"""See PEP 3333. `wsgiref.types` is Python 3.11's."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that is made anew for each request."""

    content_type: str
    make: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class QueryPage:
    """A page that depends on the query in its address."""

    content_type: str
    make: Callable[[Mapping[str, str]], bytes]


def pages(by_path: Mapping[str, Page | QueryPage | Application]) -> Application:
    """Return the application that serves these pages, and error pages where it cannot."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        def answer(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> list[bytes]:
            headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
            start_response(status, [*headers, ("Cache-Control", "no-store")])
            return [] if environ.get("REQUEST_METHOD") == "HEAD" else [body]

        page = by_path.get(environ.get("PATH_INFO", ""))
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            return answer("405 Method Not Allowed", b"GET or HEAD\n")
        if page is None:
            return answer("404 Not Found", f"there is: {' '.join(sorted(by_path))}\n".encode())
        try:
            if isinstance(page, Page):
                return answer("200 OK", page.make(), page.content_type)
            if isinstance(page, QueryPage):
                query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
                return answer("200 OK", page.make(query), page.content_type)
            return page(environ, start_response)
        except NetStormError as error:
            return answer("503 Service Unavailable", f"no answer from the job: {error}\n".encode())
        except Exception:  # noqa: BLE001 - the client may have caused it; others must not suffer
            _log.warning("while making a page", exc_info=True)
            return answer("500 Internal Server Error", b"this page cannot be made; the log says why\n")

    return application


def metrics_page(
    collect: Callable[[], Iterable[Metric]], *more: Callable[[CollectorRegistry], None]
) -> Application:
    """Return the page of metrics, in the format that Prometheus requests.

    Args:
        collect: makes the metrics, for each request.
        more: called once with the registry, to register further collectors.
    """
    registry = CollectorRegistry()
    registry.register(_Collected(collect))
    for add in more:
        add(registry)
    made: Application = make_wsgi_app(registry)
    return made


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: otherwise the registry would collect the metrics when it registers this."""
        return ()
