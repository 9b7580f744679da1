"""Chat template and token ids, there and back.

What a user typed is never read as structure: it isn't in the text that the template renders (marks stand for it), and it is encoded with
special tokens off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from mmserve.composition import Composition
from mmserve.errors import BadRequest
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message

Piece = list[int] | MediaItem
"""Part of a tokenized prompt: ids, or a media item whose rows stand there."""

_MARK = re.compile("\ue000([0-9]+)\ue001")  # stands for the user's text number n while the template runs
_MAX_PENDING = 16  # ids without a whole character, after which they are shown as they are


class Tokenizer:
    """Thread-safe for reading; one per engine."""

    def __init__(self, composition: Composition) -> None:
        self._tokenizer = _load(composition.tokenizer_file)
        self._plain = _load(composition.tokenizer_file)
        self._plain.encode_special_tokens = True  # "<|end|>" typed by a user is text
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(composition.chat_template)
        self._special_ids = {
            token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        specs = {MediaKind.IMAGE: composition.vision, MediaKind.AUDIO: composition.audio}
        self._around = {spec.placeholder: (kind, spec.around) for kind, spec in specs.items() if spec is not None}
        structure = sorted([*self._around, *self._special_ids], key=len, reverse=True)
        self._structure = re.compile("|".join(["\ue000[0-9]+\ue001", *map(re.escape, structure)]))

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text: special tokens in it are ordinary characters."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def token_text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def pieces(self, request: ChatRequest) -> list[Piece]:
        """The request's prompt in order.  Raises BadRequest when the model's template refuses the messages."""
        if request.raw_prompt:
            return [self.encode("".join(part for part in request.messages[0].parts if isinstance(part, str)))]
        texts: list[str] = []
        media: dict[MediaKind, list[MediaItem]] = {kind: [] for kind in MediaKind}
        messages = [_template_message(message, texts, media) for message in request.messages]
        try:
            rendered = self._template.render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refused the messages: {error}", param="messages") from error
        return self._split(rendered, texts, media)

    def _split(self, rendered: str, texts: list[str], media: dict[MediaKind, list[MediaItem]]) -> list[Piece]:
        pieces: list[Piece] = [[]]
        waiting = {kind: iter(items) for kind, items in media.items()}
        plain = ""  # the template's own words and the user's, encoded together when structure ends them

        def add(ids: list[int]) -> None:
            if not isinstance(pieces[-1], list):
                pieces.append([])
            last = pieces[-1]
            assert isinstance(last, list)
            last.extend(ids)

        def flush() -> None:
            nonlocal plain
            if plain:
                add(self.encode(plain))
                plain = ""

        position = 0
        for match in self._structure.finditer(rendered):
            plain += rendered[position : match.start()]
            position = match.end()
            token = match.group()
            if mark := _MARK.fullmatch(token):
                plain += texts[int(mark[1])]
                continue
            flush()
            if token in self._around:
                kind, (before, after) = self._around[token]
                add(self._structure_ids(before))
                pieces.append(next(waiting[kind]))
                add(self._structure_ids(after))
            else:
                add([self._special_ids[token]])
        plain += rendered[position:]
        flush()
        placed = sum(not isinstance(piece, list) for piece in pieces)
        if placed != sum(map(len, media.values())):
            raise BadRequest("the model's chat template leaves media out", param="messages")
        return [piece for piece in pieces if piece != []]

    def _structure_ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def detokenizer(self, prompt_tail: Sequence[int]) -> Detokenizer:
        return Detokenizer(self._tokenizer, prompt_tail)


class Detokenizer:
    """Ids in, whole characters out.  `flush` gives what a cut-off character left behind."""

    def __init__(self, tokenizer: _Tokenizer, prompt_tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_tail)[-4:]  # spaces between words depend on what came before
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became certain with this token: often one piece, sometimes nothing."""
        self._pending.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is not None:
            self._context = self._pending
            self._pending = []
            return str(text)
        # Bytes that never make a character would make every later step slower.
        return self.flush() if len(self._pending) > _MAX_PENDING else ""

    def flush(self) -> str:
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        self._stream = DecodeStream(ids=self._context[-4:], skip_special_tokens=True)
        return str(self._tokenizer.decode(pending, skip_special_tokens=True))


class StopChecker:
    """Finds stop strings in a stream of text, holding back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string ended the answer just behind it."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        safe = max(0, len(text) - self._hold)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _template_message(message: Message, texts: list[str], media: dict[MediaKind, list[MediaItem]]) -> dict[str, object]:
    """The message as templates know it, each text replaced by a mark and kept aside."""

    def mark(text: str) -> str:
        texts.append(text)
        return f"\ue000{len(texts) - 1}\ue001"

    if all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": mark("".join(str(part) for part in message.parts))}
    content: list[dict[str, str]] = []
    for part in message.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": mark(part)})
        else:
            media[part.kind].append(part)
            content.append({"type": part.kind.value})
    return {"role": message.role, "content": content}


def _load(file: Path) -> _Tokenizer:
    return _Tokenizer.from_file(str(file))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
