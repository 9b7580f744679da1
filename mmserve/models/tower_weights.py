"""Loads a module of transformers strictly: its own tensors and no other, and never with a weight made up."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from mmserve.composition import Weights
from mmserve.models.weights import Checkpoint


def load_module(kind: Any, config: PretrainedConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> Any:
    """An instance of `kind` ready to run.  Raises BadCheckpoint naming what is missing, misshapen or unknown."""
    config._attn_implementation = "sdpa"
    with no_init_weights():  # host memory that nobody touches before the weights take its place
        module = kind(config)
    checkpoint = Checkpoint(weights.path, device, dtype, names=weights.names)
    state = {name: checkpoint.take(name, *tensor.shape) for name, tensor in module.state_dict().items()}
    checkpoint.finish()
    module.load_state_dict(state, assign=True)
    return module.to(device).eval().requires_grad_(False)
