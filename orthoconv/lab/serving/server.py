"""The page of a network by HTTP, on this machine alone: two questions, each with one image, and nothing else."""

__all__ = ["MOST_BYTES", "Server"]

import base64
import hashlib
import json
import re
import threading
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from orthoconv.data import DataError
from orthoconv.lab.serving.service import Service

MOST_BYTES = 16_000_000
_DRAINED = 4 * MOST_BYTES  # of a body that is refused; a client reads the answer only after it has sent the body
_AT_ONCE = 8  # questions that are read or answered
_SECONDS = 20  # that a client may keep silent
_TYPES = {"image/png", "image/jpeg", "image/bmp", "image/webp", "image/gif", "image/tiff", "application/octet-stream"}
_METHODS = {"/": ("GET", "HEAD"), "/about": ("GET", "HEAD"), "/certify": ("POST",), "/attack": ("POST",)}


class RefusedError(Exception):
    """A request is refused, with the status and the reason that the client is told."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Server(ThreadingHTTPServer):
    """Serves the page of a network on the loopback address.

    Arguments:
        service: Answers the questions.
        port: Port to listen on; 0 for any that is free.
    """

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, service: Service, port: int = 8000) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {port}")
        self.service, self.places = service, threading.BoundedSemaphore(_AT_ONCE)
        self.page = (files("orthoconv.lab.serving") / "page.html").read_bytes()
        self.policy = _content_policy(self.page.decode())
        super().__init__(("127.0.0.1", port), Handler)
        self.names = {f"{host}:{self.server_port}" for host in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection. Every refusal is JSON with the key error."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "orthoconv", ""
    timeout = _SECONDS

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # of any method: `_answer` refuses those that a path does not have
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        try:
            path = self._allowed_path()
            if path == "/":
                self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
            elif path == "/about":
                self._send_json(HTTPStatus.OK, self.server.service.about())
            else:
                self._send_json(HTTPStatus.OK, self._asked(path))
        except RefusedError as refused:
            self.close_connection = True
            self._send_json(refused.status, {"error": refused.reason})
            self._drain()

    def _allowed_path(self) -> str:
        """Return the path of a request by a page of ours, or by a program; refuse those by pages of others."""
        host = self.headers.get_all("Host") or []
        if len(host) != 1 or host[0].lower() not in self.server.names:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"this page is served at {self.server.url} only, not at {host}")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{name}" for name in self.server.names}:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"requests of other pages are refused, here of {origin}")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and self.command == "POST":
            raise RefusedError(HTTPStatus.FORBIDDEN, "requests of other pages are refused")
        path = self.path.partition("?")[0]
        if path not in _METHODS:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is {', '.join(_METHODS)} here, and nothing else")
        if self.command not in _METHODS[path]:
            allowed = " and ".join(_METHODS[path])
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}, not {self.command}")
        return path

    def _asked(self, path: str) -> dict[str, Any]:
        if not self.server.places.acquire(blocking=False):
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"{_AT_ONCE} questions are being answered; try again")
        try:
            eps = self._eps() if path == "/attack" else 0.0
            data, service = self._body(), self.server.service
            return service.attack(data, eps) if path == "/attack" else service.certify(data)
        except (DataError, ValueError, TypeError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except RefusedError:
            raise
        except Exception as error:  # such as too little memory; the client must not wait for an answer in vain
            traceback.print_exc()
            name = type(error).__name__
            reason = f"the image could not be certified: {name}; the terminal of the server has more"
            raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, reason) from error
        finally:
            self.server.places.release()

    def _eps(self) -> float:
        given = parse_qs(urlsplit(self.path).query, max_num_fields=4).get("eps", [])
        if len(given) != 1 or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,18})?(e-?[0-9]{1,2})?", given[0]):
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"/attack needs one number ?eps=, such as /attack?eps=0.5, got {given}"
            )
        return float(given[0])

    def _body(self) -> bytes:
        """Return the body of a request, whole."""
        kind = self.headers.get_content_type()
        if kind not in _TYPES or "Content-Encoding" in self.headers:
            raise RefusedError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send an image as it is, of the type {', '.join(sorted(_TYPES))}"
            )
        size = self._length()
        if size is None:
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length, and no Transfer-Encoding")
        if size > MOST_BYTES:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an image may have {MOST_BYTES} bytes, this one has {size}"
            )
        try:
            data = self.rfile.read(size)
        except OSError as error:
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, f"the image did not arrive within {_SECONDS} s") from error
        if len(data) != size:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{size} bytes were announced, but {len(data)} arrived")
        return data

    def _length(self) -> int | None:
        given = self.headers.get_all("Content-Length") or []
        if "Transfer-Encoding" in self.headers or len(given) != 1 or not re.fullmatch(r"[0-9]{1,18}", given[0]):
            return None
        return int(given[0])

    def _drain(self) -> None:
        """Read what is left of a body that was refused, within limits."""
        left = min(self._length() or 0, _DRAINED)
        try:
            self.connection.settimeout(1)
            while left > 0 and (part := self.rfile.read1(min(left, 1 << 16))):
                left -= len(part)
        except OSError:
            return

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.request_version = self.protocol_version  # also for a client that speaks an older one, or none
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(_METHODS[self.path.partition("?")[0]]))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no HTTP, such as headers without end, in JSON as well."""
        self.close_connection = True
        self._send_json(HTTPStatus(code), {"error": message or HTTPStatus(code).phrase})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def _content_policy(page: str) -> str:
    """Allow a page its own style and script, known by their digests, its own pictures and questions, nothing else."""

    def digest(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest('style')}; script-src {digest('script')}; img-src data: blob:; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
