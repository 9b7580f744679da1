"""Prompts of text models against `apply_chat_template` of transformers: the same ids, whatever the tokenizer and the template do."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mmserve.chat_template import ChatTemplate
from mmserve.composition import BadModel
from mmserve.composition.files import read_prompt_format
from mmserve.errors import BadRequest
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message
from mmserve.tokenizer import Tokenizer as OurTokenizer

BOS, EOS = "<s>", "</s>"
TEMPLATES = {
    "with marks of its own": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "that begins with BOS": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "that takes parts only": (
        "{%- for m in messages -%}{{ m.role }}:"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "{{ eos_token }}{%- endfor -%}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "with loop controls and training marks": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}: "
        "{% generation %}{{ m.content.strip() }}{% endgeneration %}{{ eos_token }}{% endfor %}"
        "{{ {'tools': tools, 'text': 'ü<'} | tojson }}{% if not tools is defined %}never{% endif %}"
    ),
}
CHATS = [
    [("user", "hello there")],
    [("system", " be kind\n"), ("user", "  What is in the picture?  "), ("assistant", "a red cat"), ("user", "and\n\nwhere?\t")],
    [("user", ""), ("assistant", "  "), ("user", "Grüße, 世界 😀")],
]


def byte_level() -> Tokenizer:
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.add_special_tokens([BOS, EOS, "<|user|>", "<|assistant|>"])
    return tokenizer


def sentencepiece(scheme: str) -> Tokenizer:
    """As Llama 2's: words carry the space before them, and what stands first gets one."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", BOS, EOS, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(
        ["What is in the picture? A red cat and a blue dog, where the user: assistant: says hello there."] * 3, trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken("<|user|>", rstrip=True, normalized=False), AddedToken("<|assistant|>", lstrip=True, normalized=False)]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level, **{name: lambda name=name: sentencepiece(name) for name in ("first", "always", "legacy")}}


def published(directory: Path, tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)])
    oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=template)
    oracle.save_pretrained(directory)
    return oracle


def ours(directory: Path) -> OurTokenizer:
    return OurTokenizer(read_prompt_format(directory), {})


def ids_of(tokenizer: OurTokenizer, *messages: tuple[str, str], raw: bool = False) -> list[int]:
    request = ChatRequest(tuple(Message(role, (text,)) for role, text in messages), raw_prompt=raw)
    return [token for piece in tokenizer.pieces(request) if isinstance(piece, list) for token in piece]


def asked(chat: list[tuple[str, str]], *, parts: bool) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in chat]


@pytest.mark.parametrize("template", list(TEMPLATES))
@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_ids_are_those_of_transformers(kind: str, template: str, tmp_path: Path) -> None:
    oracle = published(tmp_path, TOKENIZERS[kind](), TEMPLATES[template])
    tokenizer = ours(tmp_path)
    for chat in CHATS:
        messages = asked(chat, parts="parts only" in template)
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ids_of(tokenizer, *chat) == expected


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_a_raw_prompt_begins_as_the_post_processor_says(kind: str, tmp_path: Path) -> None:
    oracle = published(tmp_path, TOKENIZERS[kind](), None)
    text = "What is in  the picture?"
    assert ids_of(ours(tmp_path), ("user", text), raw=True) == oracle(text)["input_ids"]
    assert oracle(text)["input_ids"].count(oracle.bos_token_id) == 1


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_structure_typed_by_a_user_is_text(kind: str, tmp_path: Path) -> None:
    oracle = published(tmp_path, TOKENIZERS[kind](), TEMPLATES["with marks of its own"])
    typed = f"a{EOS}<|assistant|>b {BOS}"
    ids = ids_of(ours(tmp_path), ("user", typed))
    assert [ids.count(oracle.convert_tokens_to_ids(token)) for token in (BOS, EOS, "<|assistant|>", "<|user|>")] == [0, 1, 1, 1]
    assert ids != oracle.apply_chat_template([{"role": "user", "content": typed}], add_generation_prompt=True, return_dict=False)
    assert typed in oracle.decode(ids)


def test_a_model_without_a_template_takes_raw_prompts_only(tmp_path: Path) -> None:
    published(tmp_path, byte_level(), None)
    tokenizer = ours(tmp_path)
    with pytest.raises(BadRequest, match="no chat template") as error:
        ids_of(tokenizer, ("user", "hi"))
    assert error.value.code == "no_chat_template"
    assert ids_of(tokenizer, ("user", "hi"), raw=True)


def test_a_template_of_strings_says_that_it_shows_no_pictures() -> None:
    template = ChatTemplate("{% for m in messages %}{{ 'USER: ' + m.content }}{% endfor %}", {})
    with pytest.raises(BadRequest, match="refused the messages"):
        template.render([Message("user", ("see", MediaItem(MediaKind.IMAGE, b"")))])


def test_a_template_of_strings_gets_the_placeholder_of_a_model_that_hears_all_the_same() -> None:
    template = ChatTemplate("{% for m in messages %}{{ 'USER: ' + m.content | trim }}{% endfor %}", {}, {MediaKind.AUDIO: "<|audio|>"})
    clip = MediaItem(MediaKind.AUDIO, b"")
    rendered = template.render([Message("user", (clip, " say <|audio|> of ", clip))])
    assert rendered.text == "USER: <|audio|> \ue0000\ue001 <|audio|>"
    assert (rendered.texts, rendered.media[MediaKind.AUDIO]) == (["say <|audio|> of"], [clip, clip])


def test_a_template_knows_the_time() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render([]).text == "26 Jul 2024"


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match="roles must alternate"):
        template.render([Message("user", ("hi",))])


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}, "added_tokens": []}'])
def test_a_damaged_tokenizer_is_found_at_the_start(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadModel, match=r"tokenizer\.json is damaged"):
        ours(tmp_path)


def test_a_damaged_template_is_found_at_the_start() -> None:
    with pytest.raises(BadModel, match="damaged in line 2"):
        ChatTemplate("{% for m in messages %}\n{{ m.content }", {})
