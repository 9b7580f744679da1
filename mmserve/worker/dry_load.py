"""Loads a model without its weights: every name and shape is looked at, as loading would, and no tensor is read.  A process of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import torch

from mmserve.composition import Composition
from mmserve.media import MediaKind
from mmserve.models.decoder import Decoder
from mmserve.models.weights import META, BadCheckpoint
from mmserve.transport import WorkerChannel
from mmserve.worker.encoder_worker import load_towers


def run(end: socket.socket, composition: Composition) -> None:
    """Send a tuple of what is wrong: empty if the model would load."""
    WorkerChannel(end).send(find_problems(composition))


def find_problems(composition: Composition) -> tuple[str, ...]:
    """What each part says that doesn't load; one broken part hides no other."""
    problems = []
    for name, load in _loads(composition).items():
        try:
            load()
        except BadCheckpoint as error:
            problems.append(f"{name}: {error}")
    return tuple(problems)


def _loads(composition: Composition) -> dict[str, Callable[[], object]]:
    loads: dict[str, Callable[[], object]] = {}
    for name, decoder in composition.decoders.items():
        load = partial(Decoder.load, config=decoder.config, names=decoder.weights.names)
        loads[f"{name} decoder"] = partial(load, decoder.weights.path, META, torch.float32)
    for kind in MediaKind:
        for name, spec in composition.encoders(kind).items():
            loads[f"{kind.value} encoder of {name}"] = partial(load_towers, {name: spec}, META, torch.float32)
    return loads
