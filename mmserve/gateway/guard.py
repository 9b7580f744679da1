"""Who comes in, and as whom: the key, the `Host`, the origin, and if the server is open.  One check for all routes; the default is no."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import socket

from aiohttp import hdrs, web

from mmserve.config import ConfigError, ServerConfig
from mmserve.errors import Forbidden, InvalidApiKey, Overloaded
from mmserve.gateway.state import Phase, ServerState, shutting_down
from mmserve.tenants import ANYBODY, Tenant, Tenants, key_hash

TENANT = web.RequestKey("tenant", Tenant)
OPEN_ROUTES = ("/health", "/health/live", "/health/ready")  # answer anybody, at any time
PROBED_ROUTES = (*OPEN_ROUTES, "/metrics")  # asked every few seconds, also while the server starts or closes


def needs_key(config: ServerConfig, tenants: Tenants) -> bool:
    return config.api_key is not None or tenants.roll.needs_key


def check_binding(config: ServerConfig, tenants: Tenants) -> None:
    """Raises ConfigError for an address that others can reach when nothing keeps them out."""
    if not needs_key(config, tenants) and not config.no_auth and not _is_loopback(config.host):
        raise ConfigError(
            f"refusing to listen on {config.host} without a key: give --api-key, let tenants in with `mmserve tenants add`, "
            "or say --no-auth if everybody there may use it",
            param="host",
        )
    if not 0 <= config.port < 2**16:
        raise ConfigError(f"port must be between 0 and 65535, got {config.port}", param="port")
    if config.api_key is not None and not config.api_key.strip():
        raise ConfigError("api-key must not be empty", param="api-key")


class Guard:
    """`tenants` may change at any time; the operator's own key can't."""

    def __init__(self, config: ServerConfig, tenants: Tenants) -> None:
        self._config = config
        self._tenants = tenants
        self._key_hash = None if config.api_key is None else key_hash(config.api_key)
        self._is_local = _is_loopback(config.host)

    def check(self, request: web.Request, state: ServerState) -> None:
        """Put the tenant on the request, but where anybody gets an answer.  It has been matched to its route, or to no route at all.

        Raises Forbidden, InvalidApiKey or Overloaded.
        """
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        self._check_host(request)
        if route in OPEN_ROUTES:
            return
        self._check_origin(request)
        request[TENANT] = self._identify(request)
        if route not in PROBED_ROUTES and route != "/" and not route.startswith("/playground/"):
            _check_open(state)  # the playground says by itself that the model is loading

    def _check_host(self, request: web.Request) -> None:
        """Without a key, loopback must stay loopback: a web page could have its own name resolve to it (DNS rebinding)."""
        must_be_ours = self._is_local and not needs_key(self._config, self._tenants)
        if must_be_ours and not _is_own_name(_host_name(request.headers.get(hdrs.HOST, ""))):
            raise Forbidden("this server answers to localhost and to addresses only; start it with --api-key to give it a name")

    def _check_origin(self, request: web.Request) -> None:
        """A page elsewhere can post a form to us without asking, but not with a key of its own in the headers."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or request.headers.get(hdrs.AUTHORIZATION, "").lower().startswith("bearer "):
            return
        if origin.lower().partition("://")[2] != request.headers.get(hdrs.HOST, "").lower():
            raise Forbidden("requests from other sites' pages are not accepted")

    def _identify(self, request: web.Request) -> Tenant:
        """By the key.  Hashes have one length, and who can't choose them learns nothing about a key from how long they are compared."""
        if not needs_key(self._config, self._tenants):
            return ANYBODY
        presented = _presented_key(request.headers.get(hdrs.AUTHORIZATION, ""))
        hashed = key_hash(presented)
        if self._key_hash is not None and hmac.compare_digest(hashed, self._key_hash):
            return ANYBODY
        tenant = self._tenants.roll.by_key.get(hashed)
        if tenant is None or not hmac.compare_digest(hashed, tenant.key_hash):
            raise InvalidApiKey("a valid API key is required" if presented else "an API key is required: Authorization: Bearer <key>")
        return tenant


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
