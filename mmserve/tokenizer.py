"""Prompts to token ids and back.

What a user typed is never read as structure: it is encoded in one go with the template's own text, as whatever comes before a word
decides about its tokens, but with special tokens off; where the template wrote one, a stand-in that nobody can guess takes its place.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from mmserve.chat_template import MARK, ChatTemplate, Rendered
from mmserve.composition import BadModel, Composition, PromptFormat
from mmserve.composition.files import read_text
from mmserve.errors import BadRequest
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest

Piece = list[int] | MediaItem
"""Part of a tokenized prompt: ids, or a media item whose rows stand there."""

Placeholders = Mapping[str, tuple[MediaKind, tuple[str, str]]]
"""What the template writes where an item stands -> its kind, and what is left of it before and after the rows."""

_MAX_PENDING = 16  # ids without a whole character, after which they are shown as they are


class Tokenizer:
    """One per decoder; decoders with the same prompts share it.  Thread-safe for reading."""

    def __init__(self, prompt: PromptFormat, placeholders: Placeholders) -> None:
        """Raises BadModel when the tokenizer or the chat template is damaged."""
        self.prompt = prompt
        self.placeholders = placeholders
        self._tokenizer, self._plain = _load(prompt.tokenizer_file, placeholders)
        written = {kind: placeholder for placeholder, (kind, _) in placeholders.items()}
        self._template = None if prompt.chat_template is None else ChatTemplate(prompt.chat_template, prompt.special_tokens, written)
        self._bos_ids = self._find_bos()
        self._stand_ins: dict[str, str] = {}  # special token or placeholder -> what stands for it while a prompt is encoded
        self._meaning: dict[int, int | MediaKind] = {}  # id of a stand-in -> the special token's id, or the kind of media
        self._add_stand_ins()
        structure = sorted(self._stand_ins, key=len, reverse=True)
        self._structure = re.compile("|".join([MARK.pattern, *map(re.escape, structure)]))

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

    def printable_ids(self, count: int) -> tuple[int, ...]:
        """The first `count` ids, or all there are, of ordinary tokens that are printable ASCII on their own."""
        texts = ((token_id, self.decode([token_id])) for token_id in range(self.vocab_size))
        return tuple(itertools.islice((token_id for token_id, text in texts if text and text.isascii() and text.isprintable()), count))

    def detokenizer(self, prompt_tail: Sequence[int]) -> Detokenizer:
        return Detokenizer(self._tokenizer, prompt_tail)

    def pieces(self, request: ChatRequest) -> list[Piece]:
        """The request's prompt in order.  Raises BadRequest when the model has no chat template, or one that refuses the messages."""
        if request.raw_prompt:
            return [self._bos_ids + self.encode("".join(part for part in request.messages[0].parts if isinstance(part, str)))]
        if self._template is None:
            raise BadRequest("this model has no chat template: it takes /v1/completions only", param="messages", code="no_chat_template")
        rendered = self._template.render(request.messages)
        bos = self.prompt.special_tokens.get("bos_token")
        needs_bos = self.prompt.adds_bos_to_chats and not (bos and rendered.text.startswith(bos))
        return self._split(rendered, self._bos_ids if needs_bos else ())

    def _split(self, rendered: Rendered, first_ids: Sequence[int]) -> list[Piece]:
        """Items in the place of their placeholders, and the ids between them."""
        ids = self._plain.encode(self._dress(rendered.text, rendered.texts), add_special_tokens=False).ids
        waiting = {kind: iter(items) for kind, items in rendered.media.items()}
        pieces: list[Piece] = []
        run, start = list(first_ids), 0
        for place in [place for place, token_id in enumerate(ids) if token_id in self._meaning]:
            run += ids[start:place]
            start = place + 1
            meaning = self._meaning[ids[place]]
            if not isinstance(meaning, MediaKind):
                run.append(meaning)
                continue
            item = next(waiting[meaning], None)
            if item is None:
                raise BadRequest("the model's chat template shows media more than once", param="messages")
            pieces += [run, item] if run else [item]
            run = []
        if any(next(left, None) is not None for left in waiting.values()):
            raise BadRequest("the model's chat template leaves media out", param="messages")
        run += ids[start:]
        return [*pieces, run] if run else pieces

    def _dress(self, text: str, texts: Sequence[str]) -> str:
        """What is encoded: stand-ins where the template wrote structure, and the user's words where their marks are."""

        def replace(match: re.Match[str]) -> str:
            token = match.group()
            if mark := MARK.fullmatch(token):
                return texts[int(mark[1])]
            if token not in self.placeholders:
                return self._stand_ins[token]
            _, (before, after) = self.placeholders[token]
            return self._dress(before, ()) + self._stand_ins[token] + self._dress(after, ())

        return self._structure.sub(replace, text)

    def _add_stand_ins(self) -> None:
        """For each special token and each placeholder one, that takes the white space beside it as the token itself does."""
        added = self._tokenizer.get_added_tokens_decoder()
        meanings: dict[str, int | MediaKind] = {token.content: token_id for token_id, token in added.items() if token.special}
        meanings |= {placeholder: kind for placeholder, (kind, _) in self.placeholders.items()}
        ways = {token.content: (token.lstrip, token.rstrip, token.single_word) for token in added.values()}
        nonce = secrets.token_hex(8)
        for number, (text, meaning) in enumerate(meanings.items()):
            stand_in = f"\ue002{nonce}.{number}\ue003"
            lstrip, rstrip, single_word = ways.get(text, (False, False, False))
            self._plain.add_tokens([AddedToken(stand_in, lstrip=lstrip, rstrip=rstrip, single_word=single_word, normalized=False)])
            token_id = self._plain.token_to_id(stand_in)
            assert token_id is not None
            self._stand_ins[text] = stand_in
            self._meaning[token_id] = meaning

    def _find_bos(self) -> list[int]:
        """What the tokenizer's post-processor puts before a prompt.  What it would put behind is left out: an answer comes there."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
        return list(whole[: starts[0]]) if starts else []


def load_tokenizers(composition: Composition) -> dict[str, Tokenizer]:
    """By decoder.  Raises BadModel."""
    tokenizers: dict[str, Tokenizer] = {}
    for name, decoder in composition.decoders.items():
        specs = {kind: composition.encoders(kind).get(name) for kind in MediaKind}
        placeholders = {spec.placeholder: (kind, spec.around) for kind, spec in specs.items() if spec is not None}
        alike = [each for each in tokenizers.values() if (each.prompt, each.placeholders) == (decoder.prompt, placeholders)]
        tokenizers[name] = alike[0] if alike else Tokenizer(decoder.prompt, placeholders)
    return tokenizers


def _load(file: Path, placeholders: Placeholders) -> tuple[_Tokenizer, _Tokenizer]:
    """As it is, and with special tokens off: "<|end|>" typed by a user is text.  So is a placeholder, whatever the file says it is."""
    text = read_text(file)
    try:
        data = json.loads(text)
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["content"] in placeholders
        whole, plain = _Tokenizer.from_str(text), _Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises nothing narrower
        raise BadModel(f"{file} is damaged: {error}") from error
    plain.encode_special_tokens = True
    return whole, plain


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
