"""Who may come in: the key, the `Host`, the origin, and whether the server is open.  One check for all routes; the default is no."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import socket

from aiohttp import hdrs, web

from mmserve.config import ConfigError, ServerConfig
from mmserve.errors import Forbidden, InvalidApiKey, Overloaded
from mmserve.gateway.state import Phase, ServerState, shutting_down

OPEN_ROUTES = ("/health", "/health/live", "/health/ready")  # answer anybody, at any time
PROBED_ROUTES = (*OPEN_ROUTES, "/metrics")  # asked every few seconds, also while the server starts or closes


def check_binding(config: ServerConfig) -> None:
    """Raises ConfigError for an address that others can reach when nothing keeps them out."""
    if config.api_key is None and not config.no_auth and not _is_loopback(config.host):
        raise ConfigError(
            f"refusing to listen on {config.host} without a key: give --api-key, or --no-auth if everybody there may use it", param="host"
        )
    if not 0 <= config.port < 2**16:
        raise ConfigError(f"port must be between 0 and 65535, got {config.port}", param="port")
    if config.api_key is not None and not config.api_key.strip():
        raise ConfigError("api-key must not be empty", param="api-key")


class Guard:
    def __init__(self, config: ServerConfig) -> None:
        self._key_digest = None if config.api_key is None else _digest(config.api_key)
        self._checks_host = config.api_key is None and _is_loopback(config.host)

    def check(self, request: web.Request, state: ServerState) -> None:
        """Raises Forbidden, InvalidApiKey or Overloaded.  `request` has been matched to its route, and to no route at all."""
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        self._check_host(request)
        if route in OPEN_ROUTES:
            return
        self._check_origin(request)
        self._check_key(request)
        if route not in PROBED_ROUTES and route != "/" and not route.startswith("/playground/"):
            _check_open(state)  # the playground says by itself that the model is loading

    def _check_host(self, request: web.Request) -> None:
        """Without a key, loopback must stay loopback: a web page could have its own name resolve to it (DNS rebinding)."""
        if self._checks_host and not _is_own_name(_host_name(request.headers.get(hdrs.HOST, ""))):
            raise Forbidden("this server answers to localhost and to addresses only; start it with --api-key to give it a name")

    def _check_origin(self, request: web.Request) -> None:
        """A page elsewhere can post a form to us without asking, but not with a key of its own in the headers."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or request.headers.get(hdrs.AUTHORIZATION, "").lower().startswith("bearer "):
            return
        if origin.lower().partition("://")[2] != request.headers.get(hdrs.HOST, "").lower():
            raise Forbidden("requests from other sites' pages are not accepted")

    def _check_key(self, request: web.Request) -> None:
        if self._key_digest is None:
            return
        presented = _presented_key(request.headers.get(hdrs.AUTHORIZATION, ""))
        # Digests have one length, and comparing them tells nothing about the key.
        if not hmac.compare_digest(_digest(presented), self._key_digest):
            raise InvalidApiKey("a valid API key is required" if presented else "an API key is required: Authorization: Bearer <key>")


def _check_open(state: ServerState) -> None:
    if state.phase is Phase.STARTING:
        raise Overloaded("the model is loading", code="loading", retry_after_s=2.0)
    if state.phase is Phase.CLOSING:
        raise shutting_down()


def _presented_key(header: str) -> str:
    """The bearer token; or the password of basic authentication, which a browser can ask its user for."""
    scheme, _, value = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic":
            try:
                return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
            except ValueError:  # not base64, not ASCII, or not UTF-8 beneath
                return ""
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_name(header: str) -> str:
    """`[::1]:8000` -> `::1`; `localhost:8000` -> `localhost`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def _is_own_name(host: str) -> bool:
    """No name at all comes from no browser; an address can't be rebound; the rest is ours if it is the machine's."""
    name = host.lower().rstrip(".")
    return name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost") or _address(name) is not None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
