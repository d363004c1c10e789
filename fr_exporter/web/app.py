"""The WSGI app: which path shows what."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app

from fr_exporter.store import Snapshot
from fr_exporter.web import api, pages
from fr_exporter.web.http import Request, Response, Route, error, html, mounted, plain, wsgi_app

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

_CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {pages.STYLE_SOURCE}",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = (
    ("Content-Security-Policy", _CONTENT_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)


def make_app(
    *,
    snapshot: Callable[[], Snapshot],
    registry: CollectorRegistry,
    config_text: Callable[[], str],
    ready: Callable[[], bool],
    reload: Callable[[], str | None] | None,
    scraped: Callable[[], None],
    now_ns: Callable[[], int],
    version: str,
) -> WSGIApplication:
    """Return the exporter's WSGI app.

    `ready` says whether the start-up scan is done. `reload` loads the configuration anew and returns the error, in one
    line, or None; it is None where reloading over HTTP is off. `scraped` is called after each answer to a GET of
    /metrics.
    """
    exposition = make_wsgi_app(registry)

    def metrics(request: Request) -> Response:
        response = mounted(exposition, request)
        if request.method == "GET":
            scraped()
        return response

    routes = (
        Route("GET", "/", lambda _: html(pages.landing(snapshot(), now_ns=now_ns(), version=version))),
        Route("GET", "/metrics", metrics),
        Route("GET", "/api/v1/diagnosis", lambda request: api.diagnosis(snapshot(), request.query.get("training_job"))),
        Route("GET", "/api/v1/diagnoses", lambda _: api.diagnoses(snapshot())),
        Route("GET", "/api/v1/incidents", lambda _: api.incidents(snapshot())),
        Route("GET", "/api/v1/incidents/*", lambda request: api.incident(snapshot(), request.rest)),
        Route("GET", "/config", lambda _: plain(config_text())),
        Route("GET", "/-/healthy", lambda _: plain("healthy")),
        Route("GET", "/-/ready", lambda _: _ready(ready())),
        Route("POST", "/-/reload", lambda _: _reload(reload)),
    )
    return wsgi_app(routes, _not_found, SECURITY_HEADERS)


def _ready(ready: bool) -> Response:
    if ready:
        return plain("ready")
    return plain("not ready: the first scan is not done yet", HTTPStatus.SERVICE_UNAVAILABLE)


def _reload(reload: Callable[[], str | None] | None) -> Response:
    if reload is None:
        return plain("reloading over HTTP is off: set web.enable_reload, or send SIGHUP", HTTPStatus.FORBIDDEN)
    failure = reload()
    if failure is not None:
        return plain(failure, HTTPStatus.INTERNAL_SERVER_ERROR)
    return plain("configuration reloaded")


def _not_found(request: Request) -> Response:
    if request.path.startswith("/api/"):
        return error(f"no such path: {request.path}", HTTPStatus.NOT_FOUND)
    return html(pages.not_found(request.path), HTTPStatus.NOT_FOUND)
