"""The playground in a real browser, against a real server with the bundled model.

The browser is the machine's own Chromium (`MMSERVE_CHROMIUM` names another); without one these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from scripts.loopback import server

CHROMIUM = os.environ.get("MMSERVE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
EXAMPLES = Path(__file__).parent.parent / "examples"
ANSWER_MS = 30_000

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with server(tmp_path_factory.mktemp("data")) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Its microphone hears the word "guitar", again and again."""
    clip = EXAMPLES / "guitar.wav"
    microphone = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={clip}")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *microphone])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, url: str) -> AsyncIterator[Page]:
    """An open playground that has greeted the server.  Fails if its script threw."""
    page = await browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    await page.goto(url)
    await expect(page.locator("#served")).to_have_text("mmserve-tiny")
    yield page
    await page.close()
    assert errors == []


async def ask(page: Page, text: str) -> None:
    await page.locator("#question").fill(text)
    await page.locator("#question").press("Enter")


async def test_a_picked_picture_is_shown_and_answered(page: Page) -> None:
    await page.locator("#files").set_input_files(EXAMPLES / "boats-and-star.jpg")
    await expect(page.locator("#attached img")).to_be_visible()
    await ask(page, "How many boats are there?")
    await expect(page.locator(".answer").last).to_contain_text("two", timeout=ANSWER_MS)
    await expect(page.locator(".facts").last).to_contain_text("image: 576 tokens, encoded", timeout=ANSWER_MS)
    # The picture stays attached; asked about again, it is not encoded again.
    await ask(page, "Is there a star?")
    await expect(page.locator(".answer").last).to_contain_text("Yes", timeout=ANSWER_MS)
    await expect(page.locator(".facts").last).to_contain_text("cached", timeout=ANSWER_MS)


async def test_a_recording_is_sent_as_a_clip(page: Page) -> None:
    await page.locator("#record").click()
    await expect(page.locator("#record span")).to_contain_text("Stop 1.", timeout=ANSWER_MS)
    await page.locator("#record").click()
    await expect(page.locator("#attached audio")).to_be_visible()
    await ask(page, "What do you hear?")
    await expect(page.locator(".facts").last).to_contain_text("audio: ", timeout=ANSWER_MS)
    assert "I hear" in await page.locator(".answer").last.inner_text()


async def test_what_the_server_refuses_is_said_in_the_answers_place(page: Page) -> None:
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"not a picture"}
    await page.locator("#files").set_input_files(broken)
    await ask(page, "What is in the picture?")
    await expect(page.locator(".answer.failed")).to_contain_text("not a picture", timeout=ANSWER_MS)


async def test_other_files_are_refused_by_name(page: Page) -> None:
    await page.locator("#files").set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"})
    await expect(page.locator("#notice")).to_have_text("notes.txt is neither a picture nor a clip.")
    await expect(page.locator("#send")).to_be_disabled()


async def test_new_stops_the_answer_and_forgets_the_talk(page: Page) -> None:
    await ask(page, "Tell me a story about a dog.")
    await page.locator("#clear").click()
    await expect(page.locator(".turn")).to_have_count(0)
    await expect(page.locator("#hello")).to_be_visible()
    await expect(page.locator("#send span")).to_have_text("Ask")
