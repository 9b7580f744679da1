"""Length-prefixed messages over a socket pair: asyncio on the main side, blocking in the worker.

Pickle is safe here and only here: both ends are our own processes and the socket has no name.  A closed socket is a dead peer.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from multiprocessing import reduction
from typing import Any

from mmserve.errors import WorkerDied

_LENGTH = struct.Struct("<Q")


def pack(message: object) -> bytes:
    """A message as it goes over the wire."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Channel:
    """Main's end.  One task receives; sends are whole messages and never block the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer)

    async def send(self, message: object) -> None:
        """Waits while much is on its way already.  Raises WorkerDied if the peer is gone."""
        self.write(pack(message))
        try:
            await self._writer.drain()
        except OSError as error:
            raise WorkerDied("channel closed while sending") from error

    def write(self, data: bytes) -> None:
        """A packed message, kept here until the peer takes it.  Raises WorkerDied if the peer is gone."""
        if self._writer.is_closing():  # writing now is an OSError on one loop and a RuntimeError on another
            raise WorkerDied("channel closed")
        self._writer.write(data)

    async def receive(self) -> Any:
        """The next message.  Raises WorkerDied when the peer closed its end."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerDied("channel closed") from error

    def close(self) -> None:
        self._writer.close()


class WorkerChannel:
    """The worker's end: plain blocking calls.  EOFError means main is gone, and so should the worker be."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end

    def send(self, message: object) -> None:
        self._socket.sendall(pack(message))

    def receive(self) -> Any:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if received == 0:
                raise EOFError("main closed the channel")
            view = view[received:]
        return data


class Rendezvous:
    """A file without a name in which the ranks of a tensor-parallel group find one another (torch.distributed's FileStore).

    Passed to processes at spawn, like the shared buffer; gone with the last of them.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.memfd_create("mmserve-ranks", os.MFD_CLOEXEC) if fd is None else fd

    def __reduce__(self) -> tuple[Any, ...]:
        return (_attach, (reduction.DupFd(self._fd),))

    @property
    def path(self) -> str:
        """To be opened by this process while the object lives."""
        return f"/proc/self/fd/{self._fd}"

    def renew(self) -> None:
        """Forget what the ranks of an earlier life, which must be over, have written."""
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        os.close(self._fd)


def _attach(fd: Any) -> Rendezvous:
    return Rendezvous(fd.detach())
