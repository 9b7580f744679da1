"""A server as a user starts it that is told to stop while its encoder hangs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import psutil

from scripts.faults.family import gone
from scripts.loopback import free_port, image_part, text_part, user, wait_ready

DRAIN_S = 3.0
EXAMPLES = Path(__file__).parent.parent / "examples"


async def test_a_server_told_to_stop_while_its_encoder_hangs_ends_its_requests_and_itself(tmp_path: Path) -> None:
    """F-39."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = tmp_path / "server.log"
    flags = ("--port", str(port), "--data-dir", str(tmp_path), "--shutdown-timeout", str(DRAIN_S))
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "mmserve", "serve", *flags, stdout=file, stderr=file)
    try:
        await wait_ready(f"{url}/health/ready", process, log)
        (encoder,) = {int(pid) for pid in re.findall(r"worker=image-encoder-0 pid=(\d+) ready", log.read_text())}
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(encoder, signal.SIGSTOP)
        picture = image_part((EXAMPLES / "cat.jpg").read_bytes(), "image/jpeg")
        body = {"model": "small", "messages": user(picture, text_part("What is it?")), "stream": True}
        async with aiohttp.ClientSession() as http:
            before = await _num_asked(http, url)
            asking = asyncio.create_task(_read(http, f"{url}/v1/chat/completions", body))
            async with asyncio.timeout(60):
                while await _num_asked(http, url) == before:
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            status = await asyncio.wait_for(process.wait(), 60)  # the encoder itself would be waited for twice as long
            answer = await asyncio.gather(asking, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert status == 0
    assert "shutdown" in str(answer[0])
    assert (await gone([child.pid for child in children], timeout_s=30))[0] == set()


async def _num_asked(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Pictures whose rows were asked for, so far."""
    return re.findall(r'mm_cache_queries_total\{modality="image"\} (.*)', await _read(http, f"{url}/metrics"))


async def _read(http: aiohttp.ClientSession, url: str, body: dict | None = None) -> str:
    async with http.request("GET" if body is None else "POST", url, json=body) as response:
        return await response.text()
