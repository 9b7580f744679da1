"""The worker processes themselves: started as the supervisor starts them, spoken to over the wire."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from step_plans import Row, step_plan
from tiny_model import TOKENS_PER_IMAGE, build

from mmserve.child_process import start_child
from mmserve.composition import Composition, load_composition
from mmserve.media import MediaKind
from mmserve.plan import (
    DecoderReady,
    DecoderWorkerSpec,
    EncodeItem,
    EncodePlan,
    EncoderReady,
    EncoderWorkerSpec,
    MediaSlice,
    Shutdown,
    StepResult,
)
from mmserve.shared_buffer import SharedBuffer
from mmserve.transport import WorkerChannel
from mmserve.worker.main import serve

DECODER, ENCODER = "mmserve.worker.main:run_decoder", "mmserve.worker.main:run_encoder"
JOIN_S = 60


@pytest.fixture(scope="module")
def composition(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return load_composition(build(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def buffer() -> SharedBuffer:
    return SharedBuffer(2**20)


def decoder_spec(composition: Composition) -> DecoderWorkerSpec:
    return DecoderWorkerSpec("small", composition.decoders["small"].weights.path, "cpu", "float32", 1, 16, 2048, 8, 512, 2**20, 0.9)


def test_a_picture_goes_through_an_encoder_and_a_decoder_process(composition: Composition, buffer: SharedBuffer) -> None:
    encoder_spec = EncoderWorkerSpec(MediaKind.IMAGE, composition.vision, "cpu", "float32", 1, 48)
    encoder, encoder_end = start_child(ENCODER, (encoder_spec, buffer.memory), "encoder")
    decoder, decoder_end = start_child(DECODER, (decoder_spec(composition), buffer.memory), "decoder")
    encoder_channel, decoder_channel = WorkerChannel(encoder_end), WorkerChannel(decoder_end)
    assert isinstance(encoder_channel.receive(), EncoderReady)
    ready = decoder_channel.receive()
    assert isinstance(ready, DecoderReady)

    features = buffer.allocate((1, 56, 56, 3), "uint8")
    rows = buffer.allocate((TOKENS_PER_IMAGE, ready.hidden_size), "float32")
    buffer.array(features)[:] = np.random.default_rng(0).integers(0, 256, features.shape)
    encoder_channel.send(EncodePlan(3, "small", (EncodeItem(features, rows),)))
    assert encoder_channel.receive().errors == (None,)
    assert buffer.array(rows).std() > 0.1

    prompt = [5, *[0] * TOKENS_PER_IMAGE, 6, 7]
    plan = step_plan([Row(prompt, [3, 4])], 16, step_id=9, media=[MediaSlice(b"k", rows, 0, TOKENS_PER_IMAGE, 1)])
    decoder_channel.send(plan)
    with_picture = decoder_channel.receive()
    assert isinstance(with_picture, StepResult)
    assert with_picture.step_id == 9
    decoder_channel.send(dataclasses.replace(plan, media=()))
    assert decoder_channel.receive().tokens != with_picture.tokens

    # A signal that the whole group gets is not the end.
    subprocess.run(["kill", "-TERM", str(decoder.pid)], check=True)
    os.kill(decoder.pid or 0, signal.SIGINT)
    decoder_channel.send(plan)
    assert decoder_channel.receive().tokens == with_picture.tokens
    # Main's own is: multiprocessing sends it when an interpreter exits that closed nothing, and then waits.
    decoder.terminate()
    decoder.join(JOIN_S)
    assert decoder.exitcode == 0
    decoder_end.close()
    # So is the end of main.
    encoder_end.close()
    encoder.join(JOIN_S)
    assert encoder.exitcode == 0


def test_a_worker_that_cannot_load_ends_at_once_with_an_exit_code(composition: Composition, buffer: SharedBuffer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    process, end = start_child(DECODER, (dataclasses.replace(decoder_spec(composition), directory=tmp_path), buffer.memory), "decoder")
    with end, pytest.raises((EOFError, ConnectionError)):
        WorkerChannel(end).receive()
    process.join(JOIN_S)
    assert process.exitcode == 1


class FakeChannel:
    def __init__(self, inbox: list[object]) -> None:
        self.inbox = inbox
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self) -> object:
        if not self.inbox:
            raise EOFError
        return self.inbox.pop(0)


def test_the_loop_reports_ready_answers_in_order_and_stops_at_shutdown() -> None:
    channel = FakeChannel([1, 2, Shutdown(), 3])
    serve(channel, "ready", lambda message: message * 10)  # type: ignore[arg-type]
    assert channel.sent == ["ready", 10, 20]
    assert channel.inbox == [3]


def test_the_loop_ends_quietly_when_main_is_gone() -> None:
    channel = FakeChannel([1])
    serve(channel, "ready", lambda message: message)  # type: ignore[arg-type]
    assert channel.sent == ["ready", 1]


def test_the_entry_module_comes_up_without_torch() -> None:
    code = "import sys, mmserve.worker.main; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
