"""What the vision side saw: a score for each label, read from a picture's embedding rows.

A detector knows rows and labels; which picture they are of, and what an answer says about it, it doesn't.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from mmserve.composition import BadModel, EncoderSpec
from mmserve.shared_buffer import BufferSlice

LEAST_MASS = 1e-3  # patches; below it nothing more is learnt from how little a label was seen


class Detector(Protocol):
    """What a guardrail asks.  Called from threads other than the event loop's, several at once."""

    def labels(self) -> tuple[str, ...]:
        """What it can tell apart.  It has no opinion of anything else."""

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """float32 [R, H], the rows of one picture -> float32 [L], for each label how likely it is there, 0 to 1."""


class LinearProbe:
    """One linear layer names each patch, and a logistic curve over how much of the picture bears a name says whether it is there.

    score = sigmoid(slope * log(mass) + offset), where mass is the sum of softmax(weight @ row + bias) over the rows, in patches.
    """

    def __init__(self, labels: tuple[str, ...], weight: np.ndarray, bias: np.ndarray, curve: np.ndarray) -> None:
        """`weight` float32 [1 + L, H] and `bias` [1 + L], where 0 is none of the labels; `curve` [2] is slope and offset."""
        self._labels = labels
        self._weight = weight
        self._bias = bias
        self._slope, self._offset = (float(value) for value in curve)

    def labels(self) -> tuple[str, ...]:
        return self._labels

    def scores(self, rows: np.ndarray) -> np.ndarray:
        evidence = np.log(np.maximum(self.masses(rows), LEAST_MASS))
        return np.asarray(1 / (1 + np.exp(-(self._slope * evidence + self._offset))), np.float32)

    def masses(self, rows: np.ndarray) -> np.ndarray:
        """float32 [R, H] -> float32 [L]: patches that bear each label."""
        logits = rows @ self._weight.T + self._bias
        logits -= logits.max(axis=1, keepdims=True)
        shares = np.exp(logits)
        shares /= shares.sum(axis=1, keepdims=True)
        return np.asarray(shares[:, 1:].sum(axis=0))

    @classmethod
    def read(cls, file: Path, encoder: EncoderSpec, decoder: str) -> LinearProbe:
        """From safetensors.  Raises BadModel, also for a probe that was made for other weights than these."""
        try:
            with safe_open(file, "numpy") as opened:
                metadata = opened.metadata() or {}
                weight, bias, curve = (opened.get_tensor(name) for name in ("weight", "bias", "curve"))
            labels = tuple(json.loads(metadata["labels"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise BadModel(f"{file} is no probe: {error}") from None
        if metadata.get("encoder") != encoder_digest(encoder, decoder):
            raise BadModel(f"{file} was made for other weights than the {decoder} model's encoder has: train it again")
        if weight.ndim != 2 or len(weight) != len(labels) + 1 or bias.shape != (len(weight),) or curve.shape != (2,):
            raise BadModel(f"{file}: shapes {weight.shape}, {bias.shape} and {curve.shape} are none of a probe of {len(labels)} labels")
        return cls(labels, weight, bias, curve)


DETECTORS: Mapping[str, Callable[[Path, EncoderSpec, str], Detector]] = {"linear_probe": LinearProbe.read}
"""By the name in a `[guardrail]` table: reads a file for an encoder and one of its decoders, or raises BadModel."""


def encoder_digest(encoder: EncoderSpec, decoder: str) -> str:
    """Of the weights that make the rows: a tower's and a projector's."""
    return hashlib.sha256(encoder.weights.digest() + encoder.projectors[decoder].digest()).hexdigest()


def float_rows(stored: np.ndarray, where: BufferSlice) -> np.ndarray:
    """A float32 copy of rows in the shared buffer, where bfloat16 is stored as uint16."""
    if where.dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
