"""`mmserve chat`: talk to a running server in the terminal.  `/image FILE` and `/audio FILE` go with the next thing you say."""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.text import Text

COMMANDS = {
    "/image FILE": "attach a picture (JPEG, PNG, GIF, WebP) to your next message",
    "/audio FILE": "attach a clip (WAV, FLAC, OGG, MP3) to your next message",
    "/drop": "take the attachments off again",
    "/new": "start a new conversation",
    "/help": "this list",
    "/quit": "leave; Ctrl-D does, too",
}
_IMAGE_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".gif": "image/gif", ".webp": "image/webp"}
_AUDIO_FORMATS = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".oga": "ogg", ".opus": "opus"}


class ChatError(Exception):
    """To be shown to the person at the terminal, who can do something about it."""


@dataclass
class Conversation:
    """What was said, and what is attached to what will be said next."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    attached: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def attach(self, path: Path) -> None:
        """Raises ChatError if the file can't be read or its name says it is neither a picture nor a clip."""
        try:
            data = base64.b64encode(path.expanduser().read_bytes()).decode()
        except OSError as error:
            raise ChatError(f"can't read {path}: {error.strerror}") from None
        suffix = path.suffix.lower()
        if suffix in _IMAGE_TYPES:
            self.attached.append({"type": "image_url", "image_url": {"url": f"data:{_IMAGE_TYPES[suffix]};base64,{data}"}})
        elif suffix in _AUDIO_FORMATS:
            self.attached.append({"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO_FORMATS[suffix]}})
        else:
            raise ChatError(f"{path.name} is neither a picture nor a clip: {', '.join([*_IMAGE_TYPES, *_AUDIO_FORMATS])}")
        self.names.append(path.name)

    def drop(self) -> None:
        self.attached, self.names = [], []

    def say(self, text: str) -> None:
        """Attachments first, as the server puts media that nobody placed."""
        self.messages.append({"role": "user", "content": [*self.attached, {"type": "text", "text": text}]})
        self.drop()

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def unsay(self) -> None:
        """Forget the last thing said: it was refused, and would be again."""
        self.messages.pop()


class Client:
    """One server.  An async context manager."""

    def __init__(self, url: str, *, api_key: str | None, model: str) -> None:
        self._url = url.rstrip("/")
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The loop stands still at the prompt, so a connection kept open would be found closed.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def greet(self) -> str:
        """The served model's name.  Raises ChatError if nobody is there."""
        async with self._request("GET", "/v1/models") as response:
            await _check(response)
            names = [entry["id"] for entry in (await response.json())["data"]]
            return str(names[0])

    async def stream(self, messages: list[dict[str, Any]], **fields: Any) -> AsyncIterator[str]:
        """The answer, piece by piece.  Raises ChatError."""
        body = {"model": self._model, "messages": messages, "stream": True, **fields}
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            await _check(response)
            async for line in response.content:
                if (event := parse_event(line)) is not None:
                    yield event

    def _request(self, method: str, path: str, **kwargs: Any) -> _Request:
        return _Request(self._session, method, self._url + path, kwargs)


class _Request:
    """A request whose failure to connect is a ChatError."""

    def __init__(self, session: aiohttp.ClientSession, method: str, url: str, kwargs: dict[str, Any]) -> None:
        self._session, self._method, self._url, self._kwargs = session, method, url, kwargs

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._response = await self._session.request(self._method, self._url, **self._kwargs)
        except (aiohttp.ClientConnectionError, aiohttp.InvalidURL, TimeoutError):
            raise ChatError(f"no server answers at {self._url}; start one with: python -m mmserve") from None
        return self._response

    async def __aexit__(self, *_: object) -> None:
        self._response.close()


def parse_event(line: bytes) -> str | None:
    """The text in one line of a stream, if there is any.  Raises ChatError for an error event."""
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return None
    event = orjson.loads(line[6:])
    if "error" in event:
        raise ChatError(str(event["error"]["message"]))
    pieces = [choice["delta"].get("content") for choice in event["choices"]]
    return "".join(piece for piece in pieces if piece) or None


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    try:
        message = str((await response.json())["error"]["message"])
    except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
        message = "the answer is not from mmserve"
    raise ChatError(f"{message} ({response.status})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="ask this and leave; without it, a conversation")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is (default %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("MMSERVE_API_KEY"), help="its key; or in the variable MMSERVE_API_KEY")
    parser.add_argument("--model", default="auto", help="served name, small, large or auto (default %(default)s)")
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help="attach a picture; can be repeated")
    parser.add_argument("--audio", type=Path, action="append", default=[], metavar="FILE", help="attach a clip")
    parser.add_argument("--max-tokens", type=int, default=None, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is the most likely answer (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    return talk(args, Console(highlight=False))


def talk(args: argparse.Namespace, console: Console) -> int:
    """The exit status.  The loop runs only while the server is asked: at the prompt, Ctrl-C is Python's own."""
    conversation = Conversation()
    fields = {"temperature": args.temperature} | ({} if args.max_tokens is None else {"max_tokens": args.max_tokens})
    with asyncio.Runner() as runner:
        client = runner.run(_client(args))
        try:
            name = runner.run(client.greet())
            for path in [*args.image, *args.audio]:
                conversation.attach(path)
            if args.prompt is not None:
                conversation.say(args.prompt)
                runner.run(_answer(client, conversation, console, fields))
                return 0
            console.print(f"[bold]mmserve chat[/] with {name} at {args.url}. [dim]/help lists the commands.[/]")
            while (line := _read(console, conversation)) is not None:
                try:
                    if _obey(line, conversation, console):
                        runner.run(_answer(client, conversation, console, fields))
                except ChatError as error:
                    console.print(Text(str(error), style="red"))
                except KeyboardInterrupt:
                    console.print(Text("stopped", style="dim"))
        except (ChatError, KeyboardInterrupt) as error:
            console.print(Text(str(error) or "stopped", style="red"))
            return 1 if isinstance(error, ChatError) else 130
        finally:
            runner.run(client.__aexit__())
    return 0


def _read(console: Console, conversation: Conversation) -> str | None:
    """A line from the person, or None at the end.  What is attached stands above the prompt."""
    for name in conversation.names:
        console.print(Text(f"  + {name}", style="dim"))
    try:
        line = console.input("[bold cyan]>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line in ("/quit", "/exit") else line


def _obey(line: str, conversation: Conversation, console: Console) -> bool:
    """Do what one line says; True if it was a question.  Raises ChatError."""
    command, _, rest = line.partition(" ")
    match command:
        case "":
            return False
        case "/image" | "/audio":
            conversation.attach(Path(rest.strip().strip("'\"")))
        case "/drop":
            conversation.drop()
        case "/new":
            conversation.messages.clear()
            conversation.drop()
        case "/help":
            for name, meaning in COMMANDS.items():
                console.print(Text.assemble((f"  {name:<12}", "bold"), meaning))
        case _ if command.startswith("/"):
            raise ChatError(f"unknown command {command}; /help lists them")
        case _:
            conversation.say(line)
            return True
    return False


async def _client(args: argparse.Namespace) -> Client:
    return Client(args.url, api_key=args.api_key, model=args.model)


async def _answer(client: Client, conversation: Conversation, console: Console, fields: dict[str, Any]) -> None:
    """Print the answer as it comes, and keep what came of it.  A question without an answer is forgotten.  Raises ChatError."""
    said = ""
    failed = True
    try:
        async for piece in client.stream(conversation.messages, **fields):
            said += piece
            console.print(Text(piece), end="")
        failed = False
    except asyncio.CancelledError:  # Ctrl-C
        failed = not said
        raise
    finally:
        console.print()
        if failed:
            conversation.unsay()
        else:
            conversation.answer(said)
