"""The embedding cache under a real engine: other weights, a full disk, keys that have been tampered with."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import tiny_model
import torch
from small_disk import SmallDisk
from test_engine import ask, config, counter, picture, read

from mmserve import AsyncEngine, ChatRequest
from mmserve.composition import specs
from mmserve.media import window_key

PICTURES = tuple(range(500, 508))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


def question(seed: int, salt: str = "") -> ChatRequest:
    """A salt of its own finds nothing in any cache."""
    return dataclasses.replace(ask("what is in ", picture(seed), "?"), cache_salt=salt)


async def answers(engine: AsyncEngine, salt: str = "") -> tuple[list[tuple[int, ...]], set[str]]:
    """Tokens for every picture, and where their rows came from."""
    tokens, sources = [], set()
    for seed in PICTURES:
        generation = await engine.submit(question(seed, salt))
        (ids,) = await read(generation)
        tokens.append(ids)
        sources.add(generation.usage.media[0].source)
    await engine._media.cache.flush()
    return tokens, sources


def num_values(data: Path) -> int:
    return sum(1 for _ in (data / "embeddings").glob("??/??/*.val"))


async def test_rows_of_other_encoder_weights_are_never_found(model: Path, tmp_path: Path) -> None:
    """F-17.  Everything else is the same: decoders, projectors, pictures, the directory."""
    other = shutil.copytree(model, tmp_path / "other")
    with torch.random.fork_rng():
        torch.manual_seed(17)
        tiny_model.build_vision(other / "vision")
    async with AsyncEngine(config(other, tmp_path / "clean")) as engine:
        oracle, _ = await answers(engine)
    async with AsyncEngine(config(model, tmp_path / "shared")) as engine:
        before, _ = await answers(engine)
    assert num_values(tmp_path / "shared") >= len(PICTURES)
    async with AsyncEngine(config(other, tmp_path / "shared")) as engine:
        after, sources = await answers(engine)
        assert counter(engine, "cache_unexplained_hits_total") == 0
    assert sources == {"encoded"}
    assert after == oracle
    assert after != before


async def test_a_full_disk_costs_no_request_and_no_row(model: Path, small_filesystem: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    """F-11 and F-19: cache and ledger lie on the same three megabytes."""
    data = small_filesystem.directory / "data"
    caplog.set_level(logging.WARNING, "mmserve.encoders.disk_tier")
    async with AsyncEngine(config(model, data)) as engine:
        oracle, _ = await answers(engine, "roomy")
        num_before = num_values(data)
        small_filesystem.fill()
        full, sources = await answers(engine, "full")
        assert (full, sources) == (oracle, {"encoded"})
        assert num_values(data) == num_before
        assert [record.levelname for record in caplog.records if record.name.endswith("disk_tier")] == ["WARNING"]
        small_filesystem.free()
        freed, sources = await answers(engine, "freed")
        assert (freed, sources) == (oracle, {"encoded"})
        assert num_values(data) == num_before + len(PICTURES)
        assert engine.ledger.flush()
        db = sqlite3.connect(data / "ledger.db")
        assert db.execute("SELECT count(*), sum(vision_tokens) FROM inference_requests").fetchone() == (
            24,
            24 * tiny_model.TOKENS_PER_IMAGE,
        )
        db.close()


async def test_keys_that_overlook_the_content_are_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def careless(**parts: Any) -> bytes:
        return window_key(**(parts | {"content": b""}))

    async with AsyncEngine(config(model, tmp_path)) as engine:
        for _ in range(3):
            await answers(engine)
        assert (counter(engine, "cache_unexplained_hits_total"), counter(engine, "cache_hit_rate_alarms_total")) == (0, 0)
        monkeypatch.setattr(specs, "window_key", careless)
        await answers(engine)
        assert counter(engine, "cache_unexplained_hits_total") >= len(PICTURES) - 1
        assert counter(engine, "cache_hit_rate_alarms_total") == 1
        assert "is it poisoned" in caplog.text
