"""Draws the next token of every row that wants one: all rows at once, on their device, and one copy back to the host.

A draw is a function of the row's own logits and (seed, position): neither the rest of the batch nor an earlier life of the worker
changes it.  Order: penalties, bias and bans, then temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmserve.plan import RowSampling, SampledToken
from mmserve.worker.logit_edits import adjust
from mmserve.worker.uniforms import uniforms

_NUM_BEST = 256  # candidates that top-k and top-p choose among; a row that needs more has all its tokens sorted
_CHUNK = 256  # tokens whose shares are summed, so that a draw needs a few hundred random numbers and not one per token
_COLDEST = 1e-37  # temperature; below it fp32 would divide by zero


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[SampledToken | None]:
    """fp32 logits [R, V], which may be overwritten -> one token a row, None where the logits aren't finite."""
    is_finite = logits.sum(dim=-1).isfinite()
    reports = _Reports(logits, rows)
    adjust(logits, rows)
    token_ids = logits.argmax(dim=-1)
    random = [i for i, row in enumerate(rows) if row.temperature > 0]
    if random:
        token_ids[random] = _draw(_pick(logits, random), [rows[i] for i in random])
    return reports.tokens(token_ids, is_finite)


class _Reports:
    """Log-probabilities under the model's own distribution, taken before anything is adjusted."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
        self._num_top = {i: min(row.logprobs, logits.shape[1]) for i, row in enumerate(rows) if row.logprobs is not None}
        self._logprobs = _pick(logits, list(self._num_top)).log_softmax(dim=-1) if self._num_top else logits[:0]
        self._top = self._logprobs.topk(max(self._num_top.values(), default=0))
        self._judged = [i for i, row in enumerate(rows) if row.entropy]
        self._entropies = torch.distributions.Categorical(logits=_pick(logits, self._judged), validate_args=False).entropy()

    def tokens(self, token_ids: torch.Tensor, is_finite: torch.Tensor) -> list[SampledToken | None]:
        """Bring everything to the host."""
        reported = self._logprobs.gather(1, token_ids[list(self._num_top)].unsqueeze(1)).squeeze(1).tolist()
        tops = [
            list(zip(ids, values, strict=True)) for ids, values in zip(self._top.indices.tolist(), self._top.values.tolist(), strict=True)
        ]
        tokens = [SampledToken(token_id) if ok else None for token_id, ok in zip(token_ids.tolist(), is_finite.tolist(), strict=True)]
        for (i, num_top), logprob, top in zip(self._num_top.items(), reported, tops, strict=True):
            if (token := tokens[i]) is not None:
                tokens[i] = SampledToken(token.token_id, logprob, tuple(top[:num_top]))
        for i, entropy in zip(self._judged, self._entropies.tolist(), strict=True):
            if (token := tokens[i]) is not None:
                tokens[i] = token._replace(entropy=entropy)
        return tokens


def _draw(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Temperature, filters, and one draw a row; int64 [R].

    Every draw is the maximum of log-shares with Gumbel noise.  A row drawn again after a worker's death has logits that differ in their
    last bits, since its batch does.  The maximum then changes only if two scores are as close as those bits; an inverse CDF would,
    wherever its one number falls between two tokens' shares.
    """
    # Relative to the best first: no temperature, however small, can then overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(_column([max(row.temperature, _COLDEST) for row in rows], logits))
    if any(row.min_p > 0 for row in rows):
        scaled.masked_fill_(scaled.exp() < _column([row.min_p for row in rows], logits), -torch.inf)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    filtered = [i for i, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1]
    free = [i for i, row in enumerate(rows) if not (row.top_k > 0 or row.top_p < 1)]
    if filtered:
        token_ids[filtered] = _draw_filtered(_pick(scaled, filtered), [rows[i] for i in filtered])
    if free:
        token_ids[free] = _draw_from_all(_pick(scaled, free), [rows[i] for i in free])
    return token_ids


def _draw_filtered(scaled: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Among the best few where those are sure to hold what top-k and top-p keep, else among all, sorted."""
    vocab_size = scaled.shape[1]
    values, ids = _best(scaled, min(_NUM_BEST, vocab_size))
    top_k = torch.tensor([min(row.top_k or vocab_size, vocab_size) for row in rows], device=scaled.device).unsqueeze(1)
    top_p = _column([row.top_p for row in rows], scaled)
    # What top-p's share is a share of: all tokens, unless top-k has cut them.
    total = scaled.exp().sum(dim=-1, keepdim=True)
    kept, is_enough = _keep_top(values, top_k, top_p, total)
    is_enough &= ((top_k <= values.shape[1]) | (top_k == vocab_size)).squeeze(1)  # or the share is of a set that isn't all here
    token_ids = ids.gather(1, _gumbel_max(kept, ids, rows)).squeeze(1)
    if short := (~is_enough).nonzero().flatten().tolist():
        few = [rows[i] for i in short]
        ordered, order = scaled[short].sort(dim=-1, descending=True, stable=True)
        ordered, _ = _keep_top(ordered, top_k[short], top_p[short], total[short])
        token_ids[short] = _draw_from_all(torch.empty_like(ordered).scatter_(1, order, ordered), few)
    return token_ids


def _best(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best of each row, best first, and their ids; equals in the order of their ids, whatever `topk` makes of them."""
    columns = torch.arange(scaled.shape[1], device=scaled.device)
    best = []
    for part in scaled.split(2 if scaled.device.type == "cpu" else len(scaled)):  # on the CPU as much as stays in a core's cache
        # No logit is above 0 here, and the bits of a float that isn't negative order as its value: distance, then id.
        keys = part.abs().view(torch.int32).long().bitwise_left_shift_(32).add_(columns)
        best.append(keys.topk(count, dim=-1, largest=False).values)
    keys = torch.cat(best)
    return -(keys >> 32).int().view(torch.float32), keys & 0xFFFFFFFF


def _keep_top(ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-inf for what is neither among the `top_k` best nor in the smallest set of them that holds `top_p`; best first in and out.

    Also whether that is certain: bool [R], False where tokens that aren't here may belong to it.  `total` [R, 1] is the sum of all
    exponentials.
    """
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    shares = ordered.exp().masked_fill(rank >= top_k, 0).cumsum(dim=-1, dtype=torch.float64)
    is_cut = top_k <= ordered.shape[1]
    wanted = torch.where(top_p < 1, top_p * torch.where(is_cut, shares[:, -1:], total), torch.inf)
    before = shares.roll(1, dims=-1)
    before[:, 0] = -1  # the best always stays
    kept = ordered.masked_fill((before >= wanted) | (rank >= top_k), -torch.inf)
    return kept, (is_cut | (shares[:, -1:] >= wanted)).squeeze(1)


def _draw_from_all(scaled: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """First a chunk of neighbours by the sum of their shares, then a token of it: as one draw over all, at a fraction of the noise."""
    num_rows, vocab_size = scaled.shape
    width = min(_CHUNK, vocab_size)
    num_chunks = -(-vocab_size // width)
    shares = scaled.new_zeros(num_rows, num_chunks * width)
    torch.exp(scaled, out=shares[:, :vocab_size])
    shares = shares.view(num_rows, num_chunks, width)
    # Numbers of chunks begin where those of tokens end.
    chunk_ids = torch.arange(num_chunks * width, num_chunks * (width + 1), device=scaled.device)
    chunks = _gumbel_max(shares.sum(dim=-1).log(), chunk_ids, rows)
    members = shares.gather(1, chunks.unsqueeze(2).expand(-1, -1, width)).squeeze(1)
    token_ids = chunks * width + torch.arange(width, device=scaled.device)
    return token_ids.gather(1, _gumbel_max(members.log(), token_ids, rows)).squeeze(1)


def _gumbel_max(scores: torch.Tensor, ids: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """int64 [R, 1], the column of each row's maximum with noise; the noise of an id is a function of (seed, position, id)."""
    noise = uniforms([row.seed for row in rows], [row.position for row in rows], ids)
    return (scores.double() - noise.log().neg().log()).argmax(dim=-1, keepdim=True)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _pick(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return tensor if len(rows) == len(tensor) else tensor[rows]
