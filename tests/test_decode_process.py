"""Decoding happens elsewhere, and whatever happens there costs one request one 4xx."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from mmserve.composition.picture_fit import Stretch
from mmserve.encoders import audio, image
from mmserve.encoders.decode_process import DecodeProcesses
from mmserve.errors import BadRequest, MmserveError, Overloaded, UndecodableMedia, UnsupportedMedia
from mmserve.media import AudioHeader, MediaItem, MediaKind, MediaLimits
from mmserve.shared_buffer import BufferSlice, SharedBuffer
from tests import media_corpus as corpus

NAUGHTY = "tests.naughty_decoder:run"
LIMITS = MediaLimits(decode_cpu_s=0.5, decode_wall_s=20.0)
SIZE = 24
FIT = Stretch(SIZE, 1)


def picture(data: bytes, param: str = "here") -> MediaItem:
    return MediaItem(MediaKind.IMAGE, data, param=param)


def sound(data: bytes, param: str = "here") -> MediaItem:
    return MediaItem(MediaKind.AUDIO, data, param=param)


class Room:
    """Decode processes, a buffer, and a target for one small picture."""

    def __init__(self, decode: DecodeProcesses, buffer: SharedBuffer) -> None:
        self.decode = decode
        self.buffer = buffer
        self.target = buffer.allocate((1, SIZE, SIZE, 3), "uint8")

    async def image(self, data: bytes, target: BufferSlice | None = None) -> np.ndarray:
        target = target or self.target
        await self.decode.decode_image(picture(data), target, FIT)
        return self.buffer.array(target)[0].copy()


@asynccontextmanager
async def running(limits: MediaLimits = LIMITS, *, target: str | None = None, count: int = 1) -> AsyncIterator[Room]:
    buffer = SharedBuffer(4 * 2**20)
    decode = DecodeProcesses(buffer.memory, limits, count, **({"target": target} if target else {}))
    await decode.start()
    try:
        yield Room(decode, buffer)
    finally:
        await decode.close()


async def test_pixels_and_samples_arrive_in_the_shared_buffer() -> None:
    async with running() as room:
        data = corpus.save(corpus.scene(), "PNG")
        assert (await room.image(data) == image.decode(data, FIT)).all()
        clip = sound(corpus.wav(corpus.tone(44_100, 44_100), 44_100))
        assert await room.decode.probe_audio(clip) == AudioHeader("wav", 44_100, 1, 44_100)
        target = room.buffer.allocate((16_000,), "float32")
        await room.decode.decode_audio(clip, target)
        assert (room.buffer.array(target) == audio.decode(clip.data, 16_000, 16_000)).all()


async def test_data_larger_than_one_message_arrives_whole() -> None:
    async with running() as room:
        noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
        data = corpus.save(corpus.Image.fromarray(noise), "PNG")
        assert len(data) > 4 * 256 * 2**10
        assert (await room.image(data) == image.decode(data, FIT)).all()


async def test_a_refusal_comes_back_with_its_status_and_the_place_in_the_request() -> None:
    async with running() as room:
        for item, kind in (
            (sound(b"hello"), UndecodableMedia),
            (sound(b"#!AMR\n"), UnsupportedMedia),
            (sound(corpus.wav(np.zeros(0))), BadRequest),
        ):
            with pytest.raises(kind) as caught:
                await room.decode.probe_audio(item)
            assert caught.value.param == "here"
        with pytest.raises(UndecodableMedia) as caught:
            await room.image(corpus.save(corpus.scene(), "JPEG")[:-200])
        assert caught.value.param == "here"
        assert room.decode.num_deaths == 0


@pytest.mark.parametrize("verb", ["crash", "eat", "spin"])
async def test_a_decoder_that_crashes_explodes_or_spins_costs_one_request(verb: str) -> None:
    async with running(target=NAUGHTY) as room:
        bad, good = await asyncio.gather(room.image(verb.encode()), room.image(b"good"), return_exceptions=True)
        assert isinstance(bad, UndecodableMedia)
        assert bad.status == 422
        assert isinstance(good, np.ndarray)
        assert good.flat[0] == 7


async def test_a_decoder_that_hangs_is_killed_at_its_wall_limit() -> None:
    async with running(MediaLimits(decode_wall_s=0.5), target=NAUGHTY) as room:
        (pid,) = room.decode.pids
        with pytest.raises(UndecodableMedia, match="takes too long"):
            await room.image(b"hang")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert room.decode.num_deaths == 1


async def test_a_bug_in_a_decoder_is_a_refusal_without_its_text() -> None:
    async with running(target=NAUGHTY) as room:
        with pytest.raises(UndecodableMedia) as caught:
            await room.image(b"bug")
        assert caught.value.message == "the media can't be decoded"
        assert (await room.image(b"good")).flat[0] == 7


async def test_what_a_decoder_writes_to_its_terminal_is_heard_by_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """C libraries print what they think of a file, and a file can make them print megabytes."""
    async with running(target=NAUGHTY) as room:
        assert (await room.image(b"shout")).flat[0] == 7
    captured = capfd.readouterr()
    assert "secret" not in captured.out + captured.err


async def test_a_decoder_can_open_no_file_and_no_socket(tmp_path: Path) -> None:
    async with running(target=NAUGHTY) as room:
        assert (await room.image(f"open:{tmp_path}".encode())).flat[0] == 0


async def test_the_limits_take_nothing_from_any_odd_file() -> None:
    """A library that first needs another module for a rare file couldn't load it any more."""
    async with running() as room:
        pictures = [*corpus.odd_pictures().values(), *(corpus.oriented(6, format) for format in ("JPEG", "PNG", "WEBP", "MPO"))]
        for data in pictures:
            assert (await room.image(data) == image.decode(data, FIT)).all()
        target = room.buffer.allocate((16_000,), "float32")
        for data, num_samples in corpus.odd_clips().values():
            part = BufferSlice(target.offset, (num_samples,), "float32")
            header = await room.decode.probe_audio(sound(data))
            assert -(-header.num_frames * 16_000 // header.sample_rate) == num_samples
            await room.decode.decode_audio(sound(data), part)
            assert (room.buffer.array(part) == audio.decode(data, 16_000, num_samples)).all()
        assert room.decode.num_deaths == 0


async def test_a_decoder_stands_back_where_cores_are_few() -> None:
    """Twenty photos a second kept the loop of a machine of two cores waiting for one of them, for a second at worst."""
    async with running() as room:
        (pid,) = room.decode.pids
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)


async def test_a_child_killed_while_idle_is_replaced_unnoticed() -> None:
    async with running() as room:
        os.kill(room.decode.pids[0], signal.SIGKILL)
        assert (await room.image(corpus.save(corpus.scene(), "PNG"))).any()


async def test_a_child_killed_while_idle_is_replaced_before_anybody_asks() -> None:
    """It used to be noticed by the next picture, which then waited for a process to start."""
    async with running() as room:
        (pid,) = room.decode.pids
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while room.decode.pids in ([], [pid]):
                await asyncio.sleep(0.01)


async def test_a_job_whose_child_is_killed_from_outside_is_done_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    async with running(target=NAUGHTY) as room:
        assert (await room.image(f"die once:{flag}".encode())).flat[0] == 7
        assert room.decode.num_deaths == 1


async def test_a_cancelled_job_returns_only_when_nobody_writes_its_target_any_more(tmp_path: Path) -> None:
    """Else its memory would be given to another picture while the child still paints."""
    gate = tmp_path / "gate"
    async with running(target=NAUGHTY) as room:
        room.buffer.array(room.target)[...] = 0
        task = asyncio.create_task(room.image(f"wait for:{gate}".encode()))
        while not any(entry.running for entry in room.decode._running):
            await asyncio.sleep(0)
        for _ in range(2):  # not even a second cancellation may hurry it
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        gate.touch()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert room.buffer.array(room.target).flat[0] == 7
        assert (await room.image(b"good")).flat[0] == 7
        assert room.decode.num_deaths == 0


async def test_a_job_cancelled_in_the_queue_never_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with running(target=NAUGHTY) as room:
        other = room.buffer.allocate((1, SIZE, SIZE, 3), "uint8")
        room.buffer.array(other)[...] = 0
        first = asyncio.create_task(room.image(f"wait for:{gate}".encode()))
        second = asyncio.create_task(room.image(b"good", other))
        while not any(entry.running for entry in room.decode._running):
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.touch()
        await first
        await room.image(b"good")
        assert not room.buffer.array(other).any()


async def test_two_lanes_work_side_by_side(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with running(target=NAUGHTY, count=2) as room:
        other = room.buffer.allocate((1, SIZE, SIZE, 3), "uint8")
        slow = asyncio.create_task(room.image(f"wait for:{gate}".encode()))
        assert (await room.image(b"good", other)).flat[0] == 7
        gate.touch()
        await slow


async def test_closing_leaves_no_child_and_no_waiting_caller() -> None:
    async with running(target=NAUGHTY) as room:
        pids = room.decode.pids
        calls = [asyncio.create_task(room.image(b"hang")) for _ in range(3)]
        while not any(entry.running for entry in room.decode._running):
            await asyncio.sleep(0)
        await room.decode.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded] * 3
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(Overloaded):
            await room.image(b"good")


async def test_bombs_that_slip_past_the_door_are_stopped_in_the_child() -> None:
    async with running() as room:
        for data in (corpus.scan_bomb(1000), corpus.png_bomb(), corpus.webp_canvas_bomb(), corpus.gif_with_frame_beyond_screen()):
            with pytest.raises(MmserveError) as caught:
                await room.image(data)
            assert caught.value.status in (413, 422)


def test_the_child_imports_decoders_and_nothing_heavy() -> None:
    code = "import sys; import mmserve.encoders.decode_child; from mmserve.encoders import audio, image; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "transformers", "aiohttp", "prometheus_client", "diskcache", "scipy", "tokenizers"}
    assert heavy.isdisjoint(modules)
    assert {"numpy", "PIL", "soundfile", "soxr"} <= set(modules)
