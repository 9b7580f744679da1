"""Floor 1: shared buffer, transport, config, composition, media identity, sampling ranges."""

import asyncio
import contextlib
import dataclasses
import os
import pickle
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.child_process import start_child
from mmserve.composition import BUNDLED, load_composition
from mmserve.config import Config, ConfigError, flags, from_mapping, parse_devices
from mmserve.errors import BadRequest, MmserveError, OutOfBuffer, Overloaded, WorkerDied
from mmserve.media import ImageHeader, MediaKind, window_key
from mmserve.request import SamplingParams
from mmserve.shared_buffer import SharedBuffer
from mmserve.transport import Channel, WorkerChannel

NAN = float("nan")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_extents_always_tile_the_shared_buffer(operations):
    buffer, held = SharedBuffer(8192), []
    for allocate, number in operations:
        if allocate:
            with contextlib.suppress(OutOfBuffer):
                held.append(buffer.allocate((number,), "uint8"))
        elif held:
            buffer.release(held.pop(number % len(held)))
        buffer.check()
    for where in held:
        buffer.release(where)
    assert buffer.num_free_bytes == 8192
    buffer.memory.close()


def test_slices_do_not_overlap():
    buffer = SharedBuffer(4096)
    first, second = buffer.allocate((100,), "float32"), buffer.allocate((100,), "float32")
    buffer.array(first)[:] = 1
    buffer.array(second)[:] = 2
    assert set(buffer.array(first)) == {1.0}
    buffer.memory.close()


def test_a_slice_released_twice_is_our_own_bug():
    buffer = SharedBuffer(4096)
    where = buffer.allocate((1,), "uint8")
    buffer.release(where)
    with pytest.raises(AssertionError, match="released twice"):
        buffer.release(where)
    buffer.memory.close()


def write_sevens(end: socket.socket, memory, where) -> None:
    memory.array(where)[:] = 7
    WorkerChannel(end).send({"pid": os.getpid()})


async def test_a_child_writes_where_main_reads():
    buffer = SharedBuffer(4096)
    where = buffer.allocate((5,), "float32")
    process, end = start_child("test_vocabulary:write_sevens", (buffer.memory, where), "writer")
    channel = await Channel.open(end)
    assert (await channel.receive())["pid"] == process.pid
    assert buffer.array(where).tolist() == [7.0] * 5
    with pytest.raises(WorkerDied):
        await channel.receive()
    process.join()
    channel.close()
    buffer.memory.close()


async def test_messages_cross_whole_whatever_their_size():
    ours, theirs = socket.socketpair()
    channel, worker = await Channel.open(ours), WorkerChannel(theirs)
    message = np.arange(1_000_000)
    echo = asyncio.create_task(asyncio.to_thread(lambda: worker.send(worker.receive())))
    await channel.send(message)
    assert (await channel.receive() == message).all()
    await echo
    theirs.close()
    channel.close()


async def test_a_closed_main_is_an_end_of_file_for_the_worker():
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(EOFError):
        WorkerChannel(theirs).receive()
    theirs.close()


def test_errors_cross_the_process_wall():
    error = pickle.loads(pickle.dumps(Overloaded("full", retry_after_s=3.0)))
    assert (error.status, error.message, error.retry_after_s) == (503, "full", 3.0)
    assert isinstance(error, MmserveError)


def test_every_setting_has_a_flag_and_a_key_of_its_own():
    keys = [flag.key for flag in flags()]
    assert len(keys) == len(set(keys))
    assert {"host", "port", "max-num-seqs", "micro-batch-window-ms", "data-dir"} <= set(keys)


def test_a_config_is_made_from_keys():
    config = from_mapping({"port": "9000", "max-num-seqs": 7, "max-image-pixels": 100})
    assert (config.server.port, config.scheduler.max_num_seqs, config.limits.max_image_pixels) == (9000, 7, 100)
    assert config.model == Config().model


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"prot": 1}, "unknown setting prot"),
        ({"port": "x"}, "port must be of type int"),
        ({"device": "tpu"}, "one of auto, cpu, cuda"),
        ({"tpot-target-ms": "nan"}, "tpot-target-ms must be a number that is not below zero"),
        ({"tpot-target-ms": -1.0}, "tpot-target-ms must be a number that is not below zero"),
    ],
)
def test_a_wrong_setting_is_named(values, match):
    with pytest.raises(ConfigError, match=match):
        from_mapping(values)


def test_devices_are_lists_and_ranges():
    assert parse_devices("0,2-4") == (0, 2, 3, 4)
    with pytest.raises(ConfigError):
        parse_devices("1,1")


def test_windows_of_a_clip_cover_it_and_count_by_the_ceiling():
    audio = load_composition(BUNDLED).audio_of("small")
    for num_samples in [1, 639, 640, 641, *range(1, 240_000, 1371), 80_000, 80_001]:
        windows = audio.windows(b"x" * 32, "small", num_samples)
        assert [w.start for w in windows[1:]] == [w.stop for w in windows[:-1]]
        assert (windows[0].start, windows[-1].stop) == (0, num_samples)
        assert sum(w.num_rows for w in windows) == -(-num_samples // 640)


def test_everything_that_shapes_rows_is_in_their_key():
    facts = {
        "content": b"c", "kind": MediaKind.IMAGE, "encoder": b"e", "index": 0, "start": 0, "stop": 1, "num_rows": 2,
        "detail": "auto", "salt": b"",
    }  # fmt: skip
    others = [
        {"content": b"d"}, {"kind": MediaKind.AUDIO}, {"encoder": b"f"}, {"index": 1}, {"start": 1}, {"stop": 2}, {"num_rows": 3},
        {"detail": "low"}, {"salt": b"s"}, {"content": b"ce", "encoder": b""}, {"content": b"", "encoder": b"ce"},
    ]  # fmt: skip
    keys = {window_key(**(facts | other)) for other in [{}, *others]}
    assert len(keys) == 12


def test_rows_of_two_decoders_have_different_names():
    composition = load_composition(BUNDLED)
    vision, audio, header = composition.vision_of("small"), composition.audio_of("small"), ImageHeader("png", 1, 1)
    vision = dataclasses.replace(vision, projectors={"small": vision.projectors["small"], "large": audio.projectors["small"]})
    assert vision.windows(b"c", "small", header)[0].key != vision.windows(b"c", "large", header)[0].key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", NAN), ("temperature", -0.1), ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", 2), ("max_tokens", 0), ("n", 0), ("n", 10**6), ("seed", 2**64), ("presence_penalty", 2.5), ("frequency_penalty", NAN),
        ("repetition_penalty", 0), ("stop", ("",)), ("stop", ("a",) * 17), ("logprobs", 21), ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: NAN}),
    ],
)  # fmt: skip
def test_a_sampling_field_out_of_range_is_named(field, value):
    with pytest.raises(BadRequest) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
