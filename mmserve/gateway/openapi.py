"""`/openapi.json`: this server's own description of itself, OpenAPI 3.1.  Pure; bodies come from `schemas`, refusals from `errors`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from mmserve import errors
from mmserve.gateway import idempotency, schemas
from mmserve.gateway.call import Bounds
from mmserve.gateway.schemas import Schema

_JSON = "application/json"
_REFUSALS: dict[HTTPStatus, str] = {
    HTTPStatus.BAD_REQUEST: "A field is wrong, and `param` names it; or the prompt is longer than the context",
    HTTPStatus.UNAUTHORIZED: "No key, or not a valid one",
    HTTPStatus.FORBIDDEN: "A foreign Host, or a page of another site",
    HTTPStatus.NOT_FOUND: "No such model",
    HTTPStatus.REQUEST_TIMEOUT: "The body came too slowly",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body, a picture or a clip is too large, or the prompt could never fit",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "A content type, a container or an encoding that is not accepted",
    HTTPStatus.EXPECTATION_FAILED: "An Expect other than 100-continue",
    HTTPStatus.UNPROCESSABLE_ENTITY: "A picture or a clip can't be decoded, or an Idempotency-Key came with another body before",
    HTTPStatus.TOO_MANY_REQUESTS: "The caller's own limit; Retry-After says when to come back",
    HTTPStatus.INTERNAL_SERVER_ERROR: "A bug of ours",
    HTTPStatus.SERVICE_UNAVAILABLE: "Loading, full or shutting down; Retry-After says when to come back",
}
_OF_ANY = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.INTERNAL_SERVER_ERROR)
_OF_OPEN = (*_OF_ANY, HTTPStatus.SERVICE_UNAVAILABLE)
_OF_BODIES = (
    *_OF_OPEN, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.EXPECTATION_FAILED,
)  # fmt: skip
_OF_GENERATING = (*_OF_BODIES, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.TOO_MANY_REQUESTS)


def openapi_document(*, version: str, bounds: Bounds, models: Collection[str], ready_routes: Collection[str], needs_key: bool) -> Schema:
    """`models` are the names that `model` may be, and `ready_routes` those that readiness can be asked for."""
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "mmserve",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Text, pictures and a clip in any mix, one streamed answer. Fields that nobody knows are a 400.",
        },
        "paths": _generating() | _feedback() | _models() | _health(ready_routes) | _pages(),
        "components": {
            "schemas": {
                "ChatRequest": schemas.chat_request(bounds, models),
                "CompletionRequest": schemas.completion_request(bounds, models),
                "GenerateForm": schemas.generate_form(bounds),
                "GenerateOptions": schemas.generate_options(bounds, models),
                "FeedbackRequest": schemas.feedback_request(),
                **_answers(),
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "basic": {"type": "http", "scheme": "basic"}},
        },
    }
    return document | ({"security": [{"bearer": []}, {"basic": []}]} if needs_key else {})


def _generating() -> Schema:
    key = {
        "name": idempotency.HEADER,
        "in": "header",
        "schema": {"type": "string", "minLength": 1, "maxLength": idempotency.MAX_KEY_LENGTH, "pattern": "^[ -~]+$"},
        "description": "Sent again with the same key and body, a request joins the answer it began, or gets it once more",
    }
    # No type: some readers hold it against the text of the stream, others against each event.
    stream = {"text/event-stream": {"schema": {"description": "Chunks as `data:` events, and `data: [DONE]` at the end"}}}
    answer = {_JSON: _ref("ChatCompletion"), **stream}
    text_answer = {_JSON: _ref("Completion"), **stream}
    form = {
        "multipart/form-data": {
            "schema": {"$ref": "#/components/schemas/GenerateForm"},
            "encoding": {"options": {"contentType": _JSON}},
        }
    }
    operations = {
        "/v1/chat/completions": {
            "post": _operation("chat", "Answer a conversation", answer, _OF_GENERATING, body={_JSON: _ref("ChatRequest")})
        },
        "/v1/completions": {
            "post": _operation("complete", "Continue a text", text_answer, _OF_GENERATING, body={_JSON: _ref("CompletionRequest")})
        },
        "/v1/generate": {"post": _operation("generate", "Answer a form with files", answer, _OF_GENERATING, body=form)},
    }
    return {path: item | {"parameters": [key]} for path, item in operations.items()}


def _feedback() -> Schema:
    recorded = {_JSON: {"schema": _object({"object": {"const": "feedback"}, "recorded": {"type": "boolean"}})}}
    body = {_JSON: _ref("FeedbackRequest")}
    return {"/v1/feedback": {"post": _operation("feedback", "Say what a user thought of an answer", recorded, _OF_BODIES, body=body)}}


def _models() -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    one = _operation("model", "One model", {_JSON: _ref("Model")}, (*_OF_OPEN, HTTPStatus.NOT_FOUND))
    listed = _object({"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}})
    return {
        "/v1/models": {"get": _operation("models", "The names that `model` may be", {_JSON: {"schema": listed}}, _OF_OPEN)},
        "/v1/models/{name}": {"parameters": [name], "get": one},
    }


def _health(ready_routes: Collection[str]) -> Schema:
    """Open to everybody."""
    query = {"name": "route", "in": "query", "schema": {"enum": list(ready_routes), "default": "all"}}
    alive = {_JSON: {"schema": _object({"status": {"const": "live"}})}}

    def ready(name: str) -> Schema:
        refusals = (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.INTERNAL_SERVER_ERROR)
        operation = _operation(name, "Whether a real token, picture and clip went through", {_JSON: _ref("Readiness")}, refusals)
        operation["responses"]["503"] = {"description": "Not ready, and what is missing", "content": {_JSON: _ref("Readiness")}}
        return {"get": operation | {"parameters": [query], "security": []}}

    live = _operation("live", "Whether the process answers", alive, (HTTPStatus.FORBIDDEN, HTTPStatus.INTERNAL_SERVER_ERROR))
    return {"/health": ready("health"), "/health/ready": ready("ready"), "/health/live": {"get": live | {"security": []}}}


def _pages() -> Schema:
    def page(name: str, summary: str, content_type: str, refusals: Collection[HTTPStatus] = _OF_ANY) -> Schema:
        return {"get": _operation(name, summary, {content_type: {"schema": {"type": "string"}}}, refusals)}

    return {
        "/metrics": page("metrics", "Prometheus", "text/plain"),
        "/openapi.json": {"get": _operation("openapi", "This document", {_JSON: {"schema": {"type": "object"}}}, _OF_OPEN)},
        "/": page("playground", "The playground", "text/html"),
        "/playground/style.css": page("playgroundStyle", "Its style", "text/css"),
        "/playground/app.js": page("playgroundApp", "Its script", "text/javascript"),
        "/playground/record.js": page("playgroundRecord", "Its recorder", "text/javascript"),
    }


def _operation(
    name: str, summary: str, answer: Mapping[str, Schema], refusals: Collection[HTTPStatus], *, body: Mapping[str, Schema] | None = None
) -> Schema:
    responses: dict[str, Schema] = {
        "200": {"description": "OK", "content": dict(answer), "headers": {"x-request-id": {"schema": {"type": "string"}}}}
    }
    for status in sorted(refusals):
        response = responses[str(status.value)] = {"description": _REFUSALS[status], "content": {_JSON: _ref("Error")}}
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            response["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    operation: Schema = {"operationId": name, "summary": summary, "responses": responses}
    return operation if body is None else operation | {"requestBody": {"required": True, "content": dict(body)}}


def _answers() -> dict[str, Schema]:
    count = {"type": "integer", "minimum": 0}
    text, maybe_text = {"type": "string"}, schemas.optional({"type": "string"})
    details = {f"{kind}_tokens": count for kind in ("cached", "text", "image", "audio")}
    usage = {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count, "prompt_tokens_details": _object(details)}
    logprobs = schemas.optional({"type": "object"})
    reason = {"enum": ["stop", "length", "content_filter", "tool_calls"]}
    said = _object({"role": {"const": "assistant"}, "content": text, "refusal": {"type": "null"}})
    head = {"id": text, "created": count, "model": text, "usage": _object(usage)}

    def whole(name: str, choice: Schema) -> Schema:
        one = _object({"index": count, "logprobs": logprobs, "finish_reason": reason} | choice)
        return _object(head | {"object": {"const": name}, "choices": {"type": "array", "items": one}})

    return {
        "ChatCompletion": whole("chat.completion", {"message": said}),
        "Completion": whole("text_completion", {"text": text}),
        "Model": _object(
            {"id": text, "object": {"const": "model"}, "created": count, "owned_by": text, "max_model_len": count, "context_length": count}
            | {"modalities": {"type": "array", "items": {"enum": ["text", "image", "audio"]}}}
        ),
        "Readiness": _object(
            {"status": {"enum": ["starting", "closing", "ready", "not ready"]}, "route": text}
            | {"works": {"type": "object", "additionalProperties": {"type": "boolean"}}}
        ),
        "Error": _object({"error": _object({"message": text, "type": {"enum": _error_types()}, "param": maybe_text, "code": text})}),
    }


def _error_types() -> list[str]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MmserveError)]
    return sorted({kind.type for kind in kinds})


def _ref(name: str) -> Schema:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _object(properties: dict[str, Any]) -> Schema:
    """Of ours: all of these are always there, and others may be."""
    return {"type": "object", "properties": properties, "required": list(properties)}
