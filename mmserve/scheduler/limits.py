"""How large sequences, the running set and steps of one replica may become."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_model_len: int  # tokens of one sequence
    max_num_seqs: int  # sequences in the running set
    max_num_batched_tokens: int  # tokens in one step
    tpot_target_ms: float = math.inf  # how long a step with decodes in it may take
