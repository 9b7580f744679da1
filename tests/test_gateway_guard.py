"""Who may come in: keys, hosts, origins; and what stands open to everybody."""

from __future__ import annotations

import base64

import openai
import pytest
from fake_engine import FakeEngine
from gateway_client import chat, raw, serving

from mmserve.config import Config, ConfigError, ServerConfig
from mmserve.gateway.guard import check_binding
from mmserve.gateway.server import Gateway
from mmserve.tenants import Tenants


async def test_every_route_but_health_needs_the_key() -> None:
    async with serving(api_key="secret") as server:
        for path in ("/", "/metrics", "/v1/models", "/nowhere", "/playground/app.js", "//health", "/health/../v1/models"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/health/live", "/health/ready"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200, path
        status, _ = await server.post("/v1/chat/completions", chat())
        assert status == 401


async def test_a_right_key_is_let_in_as_bearer_or_as_a_browsers_password() -> None:
    async with serving(api_key="secret") as server:
        basic = base64.b64encode(b"anybody:secret").decode()
        for header in ("Bearer secret", "bearer secret", f"Basic {basic}"):
            status, _ = await server.get("/v1/models", headers={"Authorization": header})
            assert status == 200, header
        for header in (
            "Bearer Secret",
            "Bearer secret2",
            "Bearer ",
            "secret",
            "Basic !!",
            "Basic c2VjcmV0",
            "Basic é",
            "Basic /w==",
            "Digest secret",
        ):
            status, _ = await server.get("/v1/models", headers={"Authorization": header})
            assert status == 401, header
        async with server.http.get(server.url + "/") as response:
            assert 'Basic realm="mmserve"' in response.headers.getall("WWW-Authenticate")


async def test_openai_client_gets_its_own_error_for_a_wrong_key() -> None:
    async with serving(api_key="secret") as server, server.openai("wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_without_a_key_only_our_own_names_are_answered() -> None:
    async with serving() as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST.", "app.localhost", "192.168.1.5:8000"):
            status, _ = await server.get("/v1/models", headers={"Host": host})
            assert status == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[evil"):
            status, answer = await server.get("/v1/models", headers={"Host": host})
            assert (status, answer["error"]["code"]) == (403, "forbidden"), host


async def test_two_host_headers_are_no_host_header() -> None:
    async with serving() as server:
        answer = await raw(server.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
    assert b" 400 Bad Request\r\n" in answer
    assert b'"message":"the request is not valid HTTP"' in answer


async def test_another_sites_page_cannot_post_a_form_here() -> None:
    async with serving() as server:
        form = {"prompt": "Hi"}
        for origin in ("https://evil.example", "null", "http://[", "http://localhost:1"):
            async with server.http.post(server.url + "/v1/generate", data=form, headers={"Origin": origin}) as response:
                assert response.status == 403, origin
        status, _ = await server.post("/v1/chat/completions", chat(), headers={"Origin": server.url})
        assert status == 200


def test_listening_beyond_loopback_needs_a_key_or_a_word() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        check_binding(ServerConfig(host=host), Tenants())
    for host in ("0.0.0.0", "::", "192.168.1.5", "", "example.com"):
        with pytest.raises(ConfigError, match="--no-auth"):
            check_binding(ServerConfig(host=host), Tenants())
        check_binding(ServerConfig(host=host, no_auth=True), Tenants())
        check_binding(ServerConfig(host=host, api_key="secret"), Tenants())
    with pytest.raises(ConfigError):
        check_binding(ServerConfig(host="0.0.0.0", api_key=""), Tenants())
    with pytest.raises(ConfigError, match="65535"):
        check_binding(ServerConfig(port=65536), Tenants())
    with pytest.raises(ConfigError):
        Gateway(FakeEngine(), Config(server=ServerConfig(host="0.0.0.0")))
