"""Random models that scripts serve are whole: they load, and a picture has its place in their prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from mmserve.composition import load_composition
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message
from mmserve.tokenizer import load_tokenizers
from mmserve.worker.dry_load import find_problems
from scripts.random_model import SMALL, write_llava


def test_a_random_llava_directory_loads_and_puts_a_picture_where_it_was_sent(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava", SMALL.decoder, SMALL.vision, torch.device("cpu"))
    composition = load_composition(small=tmp_path / "llava")
    assert find_problems(composition) == ()
    assert composition.vision_of("small").fit.num_rows(640, 480) == 16
    picture = MediaItem(MediaKind.IMAGE, b"")
    before, place, after = load_tokenizers(composition)["small"].pieces(ChatRequest((Message("user", ("see ", picture, "?")),)))
    assert place is picture
    assert [len(before), len(after)] == [5, 4]  # <|user|> and four bytes; <|/image|>, a byte, <|end|> and <|assistant|>
