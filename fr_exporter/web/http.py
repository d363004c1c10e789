"""Requests, responses, and the way from one to the other: WSGI with an explicit route table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

Headers = tuple[tuple[str, str], ...]

_READS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Request:
    """What a handler sees of a request. `rest` is the part of the path that a route's `*` stands for."""

    environ: WSGIEnvironment
    method: str
    path: str
    query: Mapping[str, str]
    rest: str = ""

    @classmethod
    def of(cls, environ: WSGIEnvironment) -> Request:
        """Read a request; names are bytes on disk, so that any of them can be asked for."""
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True, errors="surrogateescape")
        return cls(
            environ=environ,
            method=environ["REQUEST_METHOD"],
            path=environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "surrogateescape") or "/",
            query={name: values[0] for name, values in query.items()},
        )


@dataclass(frozen=True, slots=True)
class Response:
    """A status, a body, and its headers."""

    status: HTTPStatus
    body: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class Route:
    """A handler of one method (`GET` serves `HEAD` too) on one path; a path that ends in `*` takes all below it."""

    method: str
    path: str
    handle: Callable[[Request], Response]

    def match(self, request: Request) -> Request | None:
        """Return the request as the handler wants it, or None where the path is another."""
        if not self.path.endswith("*"):
            return request if request.path == self.path else None
        prefix = self.path[:-1]
        return replace(request, rest=request.path[len(prefix) :]) if request.path.startswith(prefix) else None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods this route answers."""
        return _READS if self.method == "GET" else (self.method,)


def html(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a page."""
    return _response(status, "text/html; charset=utf-8", text)


def plain(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return one or more lines of text."""
    return _response(status, "text/plain; charset=utf-8", f"{text.rstrip()}\n")


def as_json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a JSON document, in ASCII: a name in a dump may hold a lone surrogate, which UTF-8 cannot."""
    return _response(status, "application/json", json.dumps(value) + "\n")


def error(message: str, status: HTTPStatus, **details: Any) -> Response:
    """Return the JSON form of an error: one clear line, and what helps to ask better."""
    return as_json({"error": message, **details}, status)


def wsgi_app(routes: Sequence[Route], not_found: Callable[[Request], Response], headers: Headers) -> WSGIApplication:
    """Return an app that serves the routes, first match first; `headers` go with every response."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request = Request.of(environ)
        response = _answer(request, routes, not_found)
        length = ("Content-Length", str(len(response.body)))
        start_response(f"{response.status.value} {response.status.phrase}", [*response.headers, *headers, length])
        return [] if request.method == "HEAD" else [response.body]

    return app


def mounted(app: WSGIApplication, request: Request) -> Response:
    """Return what another WSGI app answers to a GET of this request."""
    started: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> Callable[[bytes], object]:
        started.append((status, headers))
        return lambda _: None

    body = b"".join(app({**request.environ, "REQUEST_METHOD": "GET"}, start_response))
    status, headers = started[0]
    return Response(HTTPStatus(int(status.split()[0])), body, tuple(headers))


def _answer(request: Request, routes: Sequence[Route], not_found: Callable[[Request], Response]) -> Response:
    matches = [(route, matched) for route in routes if (matched := route.match(request)) is not None]
    for route, matched in matches:
        if request.method in route.methods:
            return route.handle(matched)
    if not matches:
        return not_found(request)
    allowed = ", ".join(sorted({name for route, _ in matches for name in route.methods}))
    response = plain(f"{request.path} answers {allowed} only", HTTPStatus.METHOD_NOT_ALLOWED)
    return replace(response, headers=(*response.headers, ("Allow", allowed)))


def _response(status: HTTPStatus, content_type: str, text: str) -> Response:
    headers = (("Content-Type", content_type), ("Cache-Control", "no-store"))
    return Response(status, text.encode("utf-8", "replace"), headers)
