"""`mmserve serve`: the engine and its HTTP door in one process, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable

from rich.console import Console

from mmserve.cli.banner import banner
from mmserve.cli.settings import add_settings, read_settings
from mmserve.config import Config, ConfigError
from mmserve.errors import MmserveError
from mmserve.gateway.face import EngineFace
from mmserve.gateway.guard import check_binding, needs_key
from mmserve.gateway.server import LINGER_S, Gateway
from mmserve.tenant_watch import TenantWatch
from mmserve.tenants import Tenants

_log = logging.getLogger(__name__)
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_START_EXIT_S = 4.0  # how long a half-started engine gets to stop
_MALLOPT = {-3: 32 * 2**20, -1: 64 * 2**20, -8: 1}  # mallopt(3): M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, bytes, and M_ARENA_MAX
_TRIM_EVERY_S = 60.0
_SWITCH_INTERVAL_S = 0.0005  # how long a thread that parses or decodes may keep the loop from the interpreter, where it can be asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 after a clean end, 1 if the server could not start, 2 for a wrong setting."""
    console = Console(stderr=True, highlight=False)
    try:
        config = read_settings(args)
        logging.basicConfig(
            level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
        )
        _tune_malloc()
        with TenantWatch(config.storage.ledger) as tenants:
            check_binding(config.server, tenants)
            _raise_open_files()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_main(config, tenants, console))
    except ConfigError as error:
        console.print(f"[bold red]mmserve:[/] {error.message}")
        return 2
    except MmserveError as error:
        console.print(f"[bold red]mmserve:[/] {error.message}")
        return 1
    except OSError as error:
        console.print(f"[bold red]mmserve:[/] {error.strerror or error}")
        return 1


async def _main(config: Config, tenants: Tenants, console: Console) -> int:
    from mmserve.engine import AsyncEngine  # not needed to refuse a wrong flag

    try:
        return await serve(AsyncEngine(config, tenants=tenants), config, console)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # all is closed; one more signal must not make a clean end look like a death


async def serve(engine: EngineFace, config: Config, console: Console) -> int:
    """Bind, start the engine, open, wait for a signal, drain.  A second signal hurries."""
    gateway = Gateway(engine, config)
    signals = _Signals(gateway.hurry)
    began_s = time.monotonic()
    try:
        await gateway.bind()
        _log.info("url=%s loading model=%s", gateway.url, engine.composition.name)
        if not await _start(engine, signals):
            return 0
        gc.freeze()  # modules and the model's books stay: looking them all over again stops the loop for a tenth of a second
        gateway.open()
        _log.info("url=%s ready start_s=%.1f", gateway.url, time.monotonic() - began_s)
        console.print(banner(gateway.url, engine.composition, config, needs_key=needs_key(config.server, engine.tenants)))
        trimming = asyncio.create_task(_trim_memory(), name="trim-memory")
        try:
            received = await signals.first()
        finally:
            trimming.cancel()
        _log.info("signal=%s draining timeout_s=%g", received.name, config.server.shutdown_timeout)
        await gateway.drain(linger_s=LINGER_S if received is signal.SIGTERM else 0.0)
        return 0
    finally:
        await gateway.close()
        await engine.close()
        signals.close()
        gc.unfreeze()
        console.show_cursor()  # a worker that was killed while it loaded has left it hidden


async def _start(engine: EngineFace, signals: _Signals) -> bool:
    """False if a signal came first."""
    starting = asyncio.create_task(engine.start())
    stopping = asyncio.create_task(signals.first())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(_START_EXIT_S):
                await starting
        return False
    finally:
        stopping.cancel()


class _Signals:
    """SIGINT and SIGTERM as something to wait for.  The second and later ones call `hurry`."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[signal.Signals] = self._loop.create_future()
        self._hurry = hurry
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._receive, number)

    async def first(self) -> signal.Signals:
        return await asyncio.shield(self._first)

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        if self._first.done():
            self._hurry()
        else:
            self._first.set_result(number)


def _tune_malloc() -> None:
    """Bodies of megabytes come and go.  glibc gives such memory back at once, and its pages are faulted in again for the next.

    And it has an arena for each thread, each of which stays as large as it ever was.  Before there is a second thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have their own ways
        for option, value in _MALLOPT.items():
            mallopt(option, value)


async def _trim_memory() -> None:
    """What a peak has left behind, now and then to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_TRIM_EVERY_S)
        await asyncio.to_thread(trim, 0)


def _raise_open_files() -> None:
    """To what the system allows: each connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
