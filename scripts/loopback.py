"""What the scripts that talk to a running server share: a server of their own, messages, metrics.  Only ever to this machine."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import ipaddress
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from openai import AsyncOpenAI
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 600.0  # a busy machine loads five processes slowly
STOP_TIMEOUT_S = 45.0
REQUEST_TIMEOUT_S = 300.0


def loopback_url(text: str) -> str:
    """An argparse type: `http://127.0.0.1:8000`.  Anything but this machine is refused."""
    parts = urlsplit(text)
    host = parts.hostname or ""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if parts.scheme != "http" or not is_local:
        raise argparse.ArgumentTypeError(f"{text} is not on this machine: these scripts put load on what they talk to")
    return text.rstrip("/")


@dataclass(frozen=True, slots=True)
class Running:
    """A server of our own: where it is, and its process, for those who mean it harm."""

    url: str
    process: asyncio.subprocess.Process
    data_dir: Path

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"


@asynccontextmanager
async def running(data_dir: Path, *flags: str) -> AsyncIterator[Running]:
    """A server of our own on a free port, ready for everything.  Its log is `data_dir`/server.log."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ("-m", "mmserve", "serve", "--port", str(port), "--data-dir", str(data_dir), *flags)
    with (data_dir / "server.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL)
        try:
            await wait_ready(f"{url}/health/ready", process, data_dir / "server.log")
            yield Running(url, process, data_dir)
        finally:
            await stop(process)


@asynccontextmanager
async def server(data_dir: Path, *flags: str) -> AsyncIterator[str]:
    """The same for those who only want to talk to it; yields its URL."""
    async with running(data_dir, *flags) as own:
        yield own.url


@asynccontextmanager
async def given_or_own_server(url: str | None, data_dir: Path) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    async with server(data_dir) as own:
        yield own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def wait_ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    """Until `url` answers 200.  Raises RuntimeError with the end of the log if the server ends first, or is too slow."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}:\n{_tail(log)}")
            if loop.time() > deadline:
                raise RuntimeError(f"the server was not ready in {START_TIMEOUT_S:.0f} s:\n{_tail(log)}")
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def stop(process: asyncio.subprocess.Process) -> None:
    """Ask, then make."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def client(url: str) -> AsyncOpenAI:
    """Without retries: what is refused is to be seen."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ.get("MMSERVE_API_KEY", "none"), max_retries=0, timeout=REQUEST_TIMEOUT_S)


# --- messages ----------------------------------------------------------------------------------------------------------------


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(data: bytes, mime: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def audio_part(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


def user(*parts: dict[str, Any]) -> list[Any]:
    """The messages of one question."""
    return [{"role": "user", "content": list(parts)}]


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def photo(pixels: np.ndarray, width: int = 4000, height: int = 3000, quality: int = 88) -> bytes:
    """A picture blown up to 12 megapixels with a sensor's noise over it: a JPEG of the size a telephone makes."""
    small = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    noise = np.random.default_rng(width).normal(0, 4, (height, width, 1)).astype(np.int16)
    noisy = np.clip(np.asarray(small, np.int16) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def same_photo_other_bytes(jpeg: bytes, rng: random.Random) -> bytes:
    """With a comment of its own, so that no cache knows it and nothing has to be compressed again."""
    comment = rng.randbytes(16)
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


# --- metrics -----------------------------------------------------------------------------------------------------------------


class Scrape:
    """One reading of `/metrics`."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """Sum over all label sets that agree with `labels`.  `name` is a sample's, without prefix: `worker_restarts_total`."""
        wanted = (labels or {}).items()
        return sum(s.value for s in self._samples if s.name == f"mmserve:{name}" and wanted <= s.labels.items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The samples of a metric that has this label and no other, by its value."""
        return {s.labels[label]: s.value for s in self._samples if s.name == f"mmserve:{name}"}

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram without labels, by upper bound."""
        return {float(s.labels["le"]): s.value for s in self._samples if s.name == f"mmserve:{name}_bucket"}


async def scrape(url: str, api_key: str | None = None) -> Scrape:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(raise_for_status=True, headers=headers) as session, session.get(f"{url}/metrics") as answer:
        return Scrape(await answer.text())


def bucket_quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """Upper bound of the bucket that holds the quantile of what was observed in between; NaN if nothing was."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    observed = max(counts.values(), default=0.0)
    return next((bound for bound, count in counts.items() if count >= share * observed), float("nan")) if observed else float("nan")


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")
