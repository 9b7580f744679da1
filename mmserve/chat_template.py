"""Messages to the model's own text, by the Jinja template that came with it, in the environment that transformers gives templates.

What a user typed isn't in the text that the template renders: marks stand for it.  So no template can be talked into structure, and what
looks like structure behind a mark is the user's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmserve.composition import BadModel
from mmserve.errors import BadRequest
from mmserve.media import MediaItem, MediaKind
from mmserve.request import Message

MARK = re.compile("\ue000([0-9]+)\ue001")  # stands for the user's text number n
# A template is a program on the messages' types: handed content of a kind it doesn't know, it may fail like one.
_FAILURES = (TemplateError, TypeError, ValueError, AttributeError, LookupError)


@dataclass
class Rendered:
    """A template's text, with a mark for each of `texts` and the model's placeholder for each media item."""

    text: str = ""
    texts: list[str] = field(default_factory=list)
    media: dict[MediaKind, list[MediaItem]] = field(default_factory=lambda: {kind: [] for kind in MediaKind})


class ChatTemplate:
    """Whether content goes in as a string or as a list of parts is found out once, by trying."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        placeholders: Mapping[MediaKind, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`placeholders` stand in the text for media where a template takes strings only.  Raises BadModel when it is no Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise BadModel(f"the chat template is damaged in line {error.lineno}: {error.message}") from None
        self._special_tokens = special_tokens
        self._placeholders = placeholders or {}
        self._takes_strings = self._shows("\ue0000\ue001")
        self._takes_parts = self._shows([{"type": "text", "text": "\ue0000\ue001"}])

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Raises BadRequest when the template refuses the messages."""
        rendered = Rendered()
        prepared = [self._prepare(message, rendered) for message in messages]
        try:
            rendered.text = self._run(prepared)
        except _FAILURES as error:
            raise BadRequest(f"the model's chat template refused the messages: {error}", param="messages") from error
        return rendered

    def _run(self, messages: list[dict[str, Any]]) -> str:
        return self._template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens)

    def _shows(self, content: object) -> bool:
        """Whether a message with this content comes out as its text, and not as Python's or JSON's way to write a list."""
        try:
            text = self._run([{"role": "user", "content": content}])
        except _FAILURES:
            return False
        return "\ue0000\ue001" in text and "'type'" not in text and '"type"' not in text

    def _prepare(self, message: Message, rendered: Rendered) -> dict[str, Any]:
        """The message as templates know it, each text replaced by a mark and kept aside."""
        texts = [part for part in message.parts if isinstance(part, str)]
        if len(texts) == len(message.parts) and (self._takes_strings or not self._takes_parts):
            return {"role": message.role, "content": _mark("".join(texts), rendered.texts)}
        kinds = {part.kind for part in message.parts if not isinstance(part, str)}
        if self._takes_strings and not self._takes_parts and kinds <= self._placeholders.keys():
            return {"role": message.role, "content": self._in_one_string(message, rendered)}
        content: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": _mark(part, rendered.texts)})
            else:
                rendered.media[part.kind].append(part)
                content.append({"type": part.kind.value})
        return {"role": message.role, "content": content}

    def _in_one_string(self, message: Message, rendered: Rendered) -> str:
        """Placeholders between the texts, for decoders that were made for text alone."""
        content = ""
        for part in message.parts:
            if isinstance(part, str):
                content += _mark(part, rendered.texts)
            else:
                rendered.media[part.kind].append(part)
                content += self._placeholders[part.kind]
        return content


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for training.  Here it only stands around its body."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _mark(text: str, texts: list[str]) -> str:
    """White space at the ends stays in sight: templates trim it, and it can't be structure.  So do empty texts, which templates skip."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    texts.append(core)
    return f"{text[:start]}\ue000{len(texts) - 1}\ue001{text[start + len(core) :]}"


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
