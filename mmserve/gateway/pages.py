"""The routes that only show something: models, health, metrics, and the playground."""

from __future__ import annotations

from importlib import metadata, resources
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from mmserve.errors import BadRequest, ModelNotFound
from mmserve.gateway.guard import needs_key
from mmserve.gateway.openapi import openapi_document
from mmserve.gateway.state import STATE, Phase, ServerState

READY_ROUTES = ("all", "text", "image", "audio")
_PLAYGROUND = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "record.js": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": _models(request.app[STATE])})


async def model(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    for entry in _models(request.app[STATE]):
        if entry["id"] == name:
            return web.json_response(entry)
    raise ModelNotFound("there is no such model; see /v1/models", param="model")


async def live(request: web.Request) -> web.Response:
    return web.json_response({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    """200 if the route asked for works: a real token, picture or clip went through.  Else 503, with what is missing."""
    state = request.app[STATE]
    route = request.query.get("route", "all")
    if route not in READY_ROUTES:
        raise BadRequest(f"route must be one of {', '.join(READY_ROUTES)}", param="route")
    is_open = state.phase is Phase.OPEN
    works = {name: is_open and state.engine.ready(name) for name in READY_ROUTES}
    status = state.phase.value if not is_open else "ready" if works[route] else "not ready"
    headers = {} if works[route] else {"Retry-After": "2"}
    return web.json_response({"status": status, "route": route, "works": works}, status=200 if works[route] else 503, headers=headers)


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[STATE].engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def openapi(request: web.Request) -> web.Response:
    state = request.app[STATE]
    document = openapi_document(
        version=_version(),
        bounds=state.bounds,
        models=["auto", *(entry["id"] for entry in _models(state))],
        ready_routes=READY_ROUTES,
        needs_key=needs_key(state.config.server, state.engine.tenants),
    )
    return web.Response(body=orjson.dumps(document), content_type="application/json")


def add_playground(app: web.Application) -> None:
    """Its files are read once; a path from outside is never one on the disk."""
    folder = resources.files("mmserve.gateway") / "playground"
    for name, content_type in _PLAYGROUND.items():
        page = _page((folder / name).read_bytes(), content_type)
        app.router.add_get("/" if name == "index.html" else f"/playground/{name}", page)


def _page(body: bytes, content_type: str) -> Any:
    headers = {
        "Content-Type": content_type,
        "Content-Security-Policy": _POLICY,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
    }

    async def page(request: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    return page


def _version() -> str:
    try:
        return metadata.version("mmserve")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0"


def _models(state: ServerState) -> list[dict[str, Any]]:
    """The served name, which routes between the decoders, and each decoder under its own."""
    engine = state.engine
    composition, length = engine.composition, engine.max_model_len
    common = {"object": "model", "created": state.created, "owned_by": "mmserve", "max_model_len": length, "context_length": length}
    takes = {state.served_name: composition.modalities, **{name: composition.modalities_of(name) for name in composition.decoders}}
    return [{"id": name, **common, "modalities": list(modalities)} for name, modalities in takes.items()]
