"""One rank of a tensor-parallel decoder, in a process that never pays for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from paged_decoder import CPU, Paged, random_ids
from step_plans import Row

from mmserve.models.decoder import Decoder
from mmserve.models.parallel import Shard


def run_rank(rank: int, root: Path, names: Sequence[str]) -> None:
    """Leave what the rank measured of each directory in `rank-N.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 2), rank=rank, world_size=2)
    torch.save({name: measure(root / name, Shard(rank, 2)) for name in names}, root / f"rank-{rank}.pt")
    dist.destroy_process_group()


def measure(directory: Path, shard: Shard) -> dict[str, object]:
    """Logits of a whole prompt, then the greedy tokens behind it and theirs."""
    decoder = Decoder.load(directory, CPU, torch.float32, shard=shard)
    prompt_ids = random_ids(40, 1, decoder.config.vocab_size)
    (prompt,) = Paged(decoder).run([Row(prompt_ids, range(3))])
    token_ids, logits = Paged(decoder).greedy(prompt_ids, 20)
    return {"prompt": prompt, "token_ids": token_ids, "logits": logits, "heads": decoder.num_local_heads}
