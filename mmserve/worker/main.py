"""The processes that compute: a decoder worker and an encoder worker, each a loop of plan in, result out.

Imported by name in a fresh process, and nothing heavy is imported before the process is set up.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from mmserve.plan import DecoderWorkerSpec, EncoderWorkerSpec, Rank, Shutdown
from mmserve.shared_buffer import SharedMemory
from mmserve.transport import WorkerChannel

log = logging.getLogger(__name__)


def run_decoder(end: socket.socket, spec: DecoderWorkerSpec, memory: SharedMemory, rank: Rank | None = None) -> None:
    """Load, warm up, report DecoderReady, then answer each StepPlan until Shutdown or until main is gone.

    With a `rank` it is one of several that hold the decoder together and are sent the same plans.
    """
    prepare_process(f"decoder-{spec.name}" + (f"-rank-{rank.rank}" if rank else ""), spec.num_threads)
    _set_num_threads(spec.num_threads)
    from mmserve.worker.decoder_worker import start_decoder

    live(end, lambda: start_decoder(spec, memory, rank))


def run_encoder(end: socket.socket, spec: EncoderWorkerSpec, memory: SharedMemory) -> None:
    """Load, warm up, report EncoderReady, then answer each EncodePlan until Shutdown or until main is gone."""
    prepare_process(f"encoder-{spec.kind.value}", spec.num_threads)
    _set_num_threads(spec.num_threads)
    from mmserve.worker.encoder_worker import start_encoder

    live(end, lambda: start_encoder(spec, memory))


def serve(channel: WorkerChannel, ready: object, answer: Callable[[Any], object]) -> None:
    """The loop itself: one message in, one answer out.  Returns when told to stop or when main is gone."""
    try:
        channel.send(ready)
        while not isinstance(message := channel.receive(), Shutdown):
            channel.send(answer(message))
    except (EOFError, ConnectionError):
        return


def live(end: socket.socket, start: Callable[[], tuple[object, Callable[[Any], object]]]) -> None:
    """One life: `start` gives the ready report and the function that answers.  Exits with 1 if it can't."""
    try:
        ready, answer = start()
    except Exception:
        log.exception("pid=%d can't start", os.getpid())
        sys.exit(1)
    log.info("pid=%d %s", os.getpid(), ready)
    serve(WorkerChannel(end), ready, answer)


def prepare_process(name: str, num_threads: int) -> None:
    """Environment and logs.  Must come before torch is imported."""
    # Waiting OpenMP threads that spin take the cores from those that compute.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a worker opens no connection
    faulthandler.enable()  # a crash in native code says where
    logging.basicConfig(format=f"%(asctime)s %(levelname)s worker={name} %(message)s", level=logging.WARNING)
    if not sys.stderr.isatty():  # whoever sits at a terminal has a bar instead
        logging.getLogger("mmserve").setLevel(logging.INFO)


def _set_num_threads(num_threads: int) -> None:
    from mmserve.worker.device import set_num_threads

    set_num_threads(num_threads)
