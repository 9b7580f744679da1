"""The process that decodes: one job at a time, under limits the kernel enforces.

It trusts nothing it is given and is trusted with nothing: it can open no file and no socket any more, and main kills it when it takes
too long.  Imports numpy, Pillow, soundfile and soxr only, and all of them before the limits fall.
"""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmserve.composition.picture_fit import PictureFit
from mmserve.errors import MmserveError, UndecodableMedia
from mmserve.media import AudioHeader, MediaKind, MediaLimits
from mmserve.shared_buffer import BufferSlice, SharedMemory
from mmserve.transport import WorkerChannel

if TYPE_CHECKING:
    import numpy as np

MAX_JOBS = 2_000  # then a fresh process: whatever a decoder leaks is bounded
PIECE_BYTES = 256 * 2**10  # of a job's data in one message, so that main's loop never copies megabytes at a time
_NICENESS = 10  # where cores are few, the loop that carries everybody's tokens goes before one request's picture


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Followed by its data in pieces.  Without a target: count the frames of a clip."""

    kind: MediaKind
    num_bytes: int
    target: BufferSlice | None = None  # uint8 [tiles, height, width, 3], or float32 [n]
    fit: PictureFit | None = None  # pictures
    sample_rate: int = 0  # audio: Hz wanted
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ChildReady:
    """First message: everything is imported and the limits are in force."""


@dataclass(frozen=True, slots=True)
class JobDone:
    """`error` is what the client is told.  After `last`, the process leaves."""

    error: MmserveError | None = None
    header: AudioHeader | None = None
    last: bool = False


def run(end: socket.socket, memory: SharedMemory, limits: MediaLimits) -> None:
    """Until main closes the channel."""
    from mmserve.encoders import audio, image  # here: main needs this module's types, not the decoders

    channel = WorkerChannel(end)
    _bind(limits)
    channel.send(ChildReady())
    for number in range(1, MAX_JOBS + 1):
        try:
            job, data = _receive(channel)
        except EOFError:
            return
        resource.setrlimit(resource.RLIMIT_CPU, (_cpu_allowance_s(limits), resource.RLIM_INFINITY))
        header, error, last = None, None, number == MAX_JOBS
        try:
            if job.target is None:
                header = audio.probe(data, limits, job.param)
            elif job.kind is MediaKind.AUDIO:
                memory.array(job.target)[...] = audio.decode(data, job.sample_rate, job.target.shape[0], limits)
            else:
                _write_picture(memory, job, image.decode(data, _fit(job), limits))
        except MmserveError as refusal:
            error = type(refusal)(refusal.message, param=job.param, code=refusal.code)
        except MemoryError:
            error, last = UndecodableMedia("the media can't be decoded: it needs too much memory", param=job.param), True
        except Exception:  # a decoder's own bug, met by a file made for it
            error, last = UndecodableMedia("the media can't be decoded", param=job.param), True
        channel.send(JobDone(error, header, last))
        if last:
            return


def _fit(job: DecodeJob) -> PictureFit:
    assert job.fit is not None, "a picture without a fit"
    return job.fit


def _write_picture(memory: SharedMemory, job: DecodeJob, pixels: np.ndarray) -> None:
    """Never by broadcasting: a header that lied about the size would fill the target with copies."""
    assert job.target is not None
    if pixels.shape != job.target.shape:
        raise UndecodableMedia("the image can't be decoded: its size is not what its header says")
    memory.array(job.target)[...] = pixels


def _receive(channel: WorkerChannel) -> tuple[DecodeJob, bytes]:
    job = channel.receive()
    assert isinstance(job, DecodeJob)
    data = bytearray()
    while len(data) < job.num_bytes:
        data += channel.receive()
    return job, bytes(data)


def _bind(limits: MediaLimits) -> None:
    """From here on: so much more memory than now, no descriptor but the channel, no core file, and no word on the terminal."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    most = mapped + limits.decode_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # what is open stays open; nothing is added


def _cpu_allowance_s(limits: MediaLimits) -> int:
    """The kernel counts a process's whole life in seconds: what was used, and one job's share on top, rounded up."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime + usage.ru_stime + limits.decode_cpu_s) + 1
