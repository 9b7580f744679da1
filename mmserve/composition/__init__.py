"""A model is a composition: decoders, and per modality an encoder, a projector for each decoder, and a rule that counts rows.

One small file for each format of a model directory: `composed` is our own, the others are published ones.  They read configs and the
headers of weights; knows nothing of torch.
"""

from __future__ import annotations

from mmserve.composition.canary import Canary, beside, read_canary
from mmserve.composition.guardrail import GuardrailSpec, read_guardrail
from mmserve.composition.load import BUNDLED, load_composition
from mmserve.composition.specs import AudioSpec, ClipSpec, Composition, DecoderSpec, EncoderSpec, PromptFormat, VisionSpec, WhisperSpec
from mmserve.composition.weights import AS_WRITTEN, BadModel, WeightNames, Weights

__all__ = [
    "AS_WRITTEN",
    "BUNDLED",
    "AudioSpec",
    "BadModel",
    "Canary",
    "ClipSpec",
    "Composition",
    "DecoderSpec",
    "EncoderSpec",
    "GuardrailSpec",
    "PromptFormat",
    "VisionSpec",
    "WeightNames",
    "Weights",
    "WhisperSpec",
    "beside",
    "load_composition",
    "read_canary",
    "read_guardrail",
]
