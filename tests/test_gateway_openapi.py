"""The server's description of itself: valid, complete, and of one mind with the parsers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fake_engine import FakeEngine
from gateway_client import PNG, chat, serving
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from test_gateway_errors import IMAGE, WRONG, said

from mmserve.config import from_mapping
from mmserve.errors import MmserveError
from mmserve.gateway.app import build_app
from mmserve.gateway.chat_api import parse_chat
from mmserve.gateway.completions_api import parse_completion
from mmserve.gateway.openapi import openapi_document
from mmserve.gateway.state import ServerState
from scripts import check_openapi
from scripts.fuzzing.doors import BOUNDS, CALLER
from scripts.fuzzing.texts import body

MODELS = ("auto", "fake-tiny", "small", "large")
# What a schema has no words for: fields that must agree, counts over several messages, ids below a number, 1.0 where only 1 is an integer.
BEYOND_A_SCHEMA = (
    chat(max_tokens=5, max_completion_tokens=6),
    chat(max_tokens=1.0),
    chat(logit_bias={"1000": 1}),
    chat(logit_bias={"7": 1, "07": 1}),
    said(*[IMAGE] * 9),
    said(*[{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}] * 2),
)


def schema(name: str) -> Draft202012Validator:
    document = openapi_document(version="1", bounds=BOUNDS, models=MODELS, ready_routes=("all",), needs_key=False)
    return Draft202012Validator(document["components"]["schemas"][name])


async def test_the_document_is_valid_and_stands_behind_the_key() -> None:
    async with serving(api_key="secret") as server:
        status, document = await server.get("/openapi.json", headers={"Authorization": "Bearer secret"})
        assert (await server.get("/openapi.json"))[0] == 401
    assert status == 200
    validate(document)
    for each in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(each)
    assert document["security"]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["oneOf"][0]["enum"] == list(MODELS)


async def test_every_route_is_in_it_and_nothing_else() -> None:
    app = build_app(ServerState(FakeEngine(), from_mapping({"port": 0})))
    routes = {(route.resource.canonical, route.method.lower()) for route in app.router.routes() if route.resource is not None}
    async with serving() as server:
        _, document = await server.get("/openapi.json")
    described = {(path, method) for path, item in document["paths"].items() for method in item if method != "parameters"}
    assert described == {(path, method) for path, method in routes if method != "head"}


@pytest.mark.parametrize(("wrong", "param"), WRONG)
def test_what_the_parser_refuses_the_schema_refuses_too(wrong: dict[str, Any], param: str) -> None:
    assert schema("ChatRequest").is_valid(wrong) is (json.dumps(wrong) in map(json.dumps, BEYOND_A_SCHEMA)), param


@pytest.mark.parametrize(
    "right",
    [
        chat(),
        chat(temperature=0, top_p=0.5, n=2, seed=-1, stop="END", stop_token_ids=[1], logit_bias={"7": -100}, top_k=-1),
        chat(model="large"),
        chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}),
        chat(logprobs=True, top_logprobs=20),
        chat(tools=[], tool_choice="auto", response_format={"type": "text"}, user="me", metadata={"a": 1}, temperature=None, model=None),
        said({"type": "text", "text": "", "cache_control": {}}, IMAGE, {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}),
        said({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        said({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}),
        {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "assistant", "content": "Hm?", "refusal": None, "name": "a"}]},
    ],
)  # fmt: skip
def test_what_the_parser_takes_the_schema_takes_too(right: dict[str, Any]) -> None:
    parse_chat(json.dumps(right).encode(), BOUNDS, CALLER)
    schema("ChatRequest").validate(right)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "parse"), [("ChatRequest", parse_chat), ("CompletionRequest", parse_completion)])
def test_of_any_bodies_the_parser_takes_none_that_the_schema_refuses(seed: int, name: str, parse: Any) -> None:
    """Unknown models pass the parser: the engine knows their names.  Data that is nearly base64 passes, too."""
    rng, validator, num_taken = random.Random(seed), schema(name), 0
    for _ in range(800):
        fields = body(rng) if name == "ChatRequest" else {key: value for key, value in body(rng).items() if key != "messages"}
        try:
            parse(json.dumps(fields).encode(), BOUNDS, CALLER)
        except MmserveError:
            continue
        num_taken += 1
        errors = [error for error in validator.iter_errors(fields) if "model" not in error.absolute_path and "data:" not in str(fields)]
        assert not errors, (fields, errors[0].message)
    assert num_taken > 5


async def test_schemathesis_finds_no_answer_that_is_not_in_it() -> None:
    """More of the same: `python -m scripts.check_openapi`."""
    assert await check_openapi.check(max_examples=3, seed=0, more=("--phases", "coverage,fuzzing")) == 0
