"""Rows -> tensors, and one forward pass over them with its losses: answers, and hints for heads that are thrown away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from scripts.tiny.projector import DECODER_WIDTH
from scripts.tiny.questions import KIND_NAMES
from scripts.tiny.rows import IGNORE, PREFIX, Row, Slot
from scripts.tiny.world import CELLS, COLORS, FRAME_LABELS, SPOKEN_QUESTIONS

Embed = Callable[[torch.Tensor, Sequence[Slot]], torch.Tensor]  # word embeddings, slots -> rows of all slots, joined
_PADDING = -1  # segment
HINT_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class Batch:
    ids: torch.Tensor  # int64 [R, T], 0 where media rows or padding are
    positions: torch.Tensor  # int64 [R, T]
    mask: torch.Tensor  # bool [R, 1, T, T]
    targets: torch.Tensor  # int64 [R, T], IGNORE or the next token
    asked: torch.Tensor  # int64 [R, T], index into `rows`' questions in order, -1 where there is no target
    media: tuple[torch.Tensor, torch.Tensor]  # row and column of every media row
    pictures: torch.Tensor  # int64 [media rows], which picture of its row each belongs to; IGNORE for clips
    slots: tuple[Slot, ...]
    rows: tuple[Row, ...]


def collate(rows: Sequence[Row]) -> Batch:
    longest = max(len(row.ids) for row in rows)
    num_before, total = [], 0
    for row in rows:
        num_before.append(total)
        total += len(row.questions)

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([getattr(row, name) + [filler] * (longest - len(row.ids)) for row in rows])

    segments = padded("segments", _PADDING)
    here, there = segments[:, :, None], segments[:, None, :]
    order = torch.arange(longest)
    causal = order[:, None] >= order[None, :]
    mask = causal & ((there == here) | (there == PREFIX))
    asked = padded("asked", -1)
    asked = torch.where(asked >= 0, asked + torch.tensor(num_before)[:, None], asked)
    at_row: list[int] = []
    at_column: list[int] = []
    pictures: list[int] = []
    for index, row in enumerate(rows):
        num_pictures = 0
        for start, slot in row.slots:
            at_row += [index] * len(slot.offsets)
            at_column += range(start, start + len(slot.offsets))
            pictures += [num_pictures if slot.is_image else IGNORE] * len(slot.offsets)
            num_pictures += slot.is_image
    return Batch(
        padded("ids", 0), padded("positions", 0), mask[:, None], padded("targets", IGNORE), asked,
        (torch.tensor(at_row, dtype=torch.long), torch.tensor(at_column, dtype=torch.long)),
        torch.tensor(pictures, dtype=torch.long),
        tuple(slot for row in rows for _, slot in row.slots), tuple(rows),
    )  # fmt: skip


class Hints(nn.Module):
    """Linear heads on the input of the last layer, which the last layer can then read.  Not exported."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DECODER_WIDTH)
        self.sizes = (4, 4, len(CELLS), len(KIND_NAMES), len(COLORS), len(FRAME_LABELS), len(SPOKEN_QUESTIONS) + 2)
        self.head = nn.Linear(DECODER_WIDTH, sum(self.sizes))
        self.picture = nn.Linear(DECODER_WIDTH, 2)
        self.asked = nn.Linear(DECODER_WIDTH, 4)
        self.plurals = nn.Linear(DECODER_WIDTH, len(KIND_NAMES))

    def picture_loss(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Each picture row behind the first layer tells which picture it belongs to."""
        return _choice_loss(self.picture(hidden[batch.media]), batch.pictures)

    def loss(self, hidden: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        hints = [(index, hint) for index, row in enumerate(rows) for hint in row.hints]
        if not hints:
            return hidden.new_zeros(())
        at = hidden[torch.tensor([i for i, _ in hints]), torch.tensor([h.at for _, h in hints])]
        at = self.norm(at)
        out = self.head(at).split(self.sizes, dim=1)
        first = torch.tensor([h.counts[0] if h.counts else IGNORE for _, h in hints])
        second = torch.tensor([h.counts[1] if len(h.counts) > 1 else IGNORE for _, h in hints])
        color = torch.tensor([IGNORE if h.color is None else h.color for _, h in hints])
        heard = torch.tensor([IGNORE if h.heard is None else h.heard for _, h in hints])
        form = torch.tensor([IGNORE if h.form is None else h.form for _, h in hints])
        loss = sum(_choice_loss(o, t) for o, t in zip((*out[:2], *out[4:]), (first, second, color, heard, form), strict=True))
        asked = torch.tensor([IGNORE if h.asked is None else h.asked for _, h in hints])
        loss = loss + _choice_loss(self.asked(at), asked)
        for logits, name, scale in ((out[2], "cells", 3.0), (out[3], "kinds", 8.0), (self.plurals(at), "plurals", 8.0)):
            known = [(i, getattr(h, name)) for i, (_, h) in enumerate(hints) if getattr(h, name) is not None]
            if known:
                mine = logits[torch.tensor([i for i, _ in known])]
                truth = torch.tensor([values for _, values in known], dtype=torch.float32)
                loss = loss + scale * functional.binary_cross_entropy_with_logits(mine, truth)
        assert isinstance(loss, torch.Tensor)
        return loss


def _choice_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not (targets != IGNORE).any():
        return logits.new_zeros(())
    return functional.cross_entropy(logits, targets, ignore_index=IGNORE)


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: torch.Tensor
    answer_loss: float
    right: list[bool]  # of each question, whether greedy decoding gives its answer word for word


def forward(decoder: LlamaForCausalLM, hints: Hints | None, batch: Batch, embed: Embed) -> Outcome:
    words = decoder.model.embed_tokens.weight
    embeds = words[batch.ids]
    if batch.slots:
        embeds = embeds.index_put(batch.media, embed(words, batch.slots))
    out = decoder.model(
        inputs_embeds=embeds,
        attention_mask=batch.mask,
        position_ids=batch.positions,
        output_hidden_states=hints is not None,
        use_cache=False,
    )
    learned = batch.targets != IGNORE
    targets, asked = batch.targets[learned], batch.asked[learned]
    logits = decoder.lm_head(out.last_hidden_state[learned])
    losses = functional.cross_entropy(logits, targets, reduction="none")
    num_questions = sum(len(row.questions) for row in batch.rows)
    lengths = torch.bincount(asked, minlength=num_questions).float()
    # A long answer weighs more than a short one, but not in proportion.
    weights = lengths[asked].rsqrt()
    answer_loss = (losses * weights).sum() / weights.sum()
    wrong = torch.zeros(num_questions).index_add_(0, asked, (logits.argmax(1) != targets).float())
    loss = answer_loss
    if hints is not None:
        loss = loss + HINT_WEIGHT * hints.loss(out.hidden_states[-2], batch.rows)
        if batch.slots:
            loss = loss + HINT_WEIGHT * hints.picture_loss(out.hidden_states[1], batch)
    return Outcome(loss, answer_loss.item(), (wrong == 0).tolist())
