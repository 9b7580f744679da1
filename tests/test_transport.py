"""The channel between main and a worker, on both event loops the server may run on."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from mmserve.errors import WorkerDied
from mmserve.transport import Channel, WorkerChannel

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_messages_of_any_size_cross_whole_and_in_order(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair()
        channel, worker = await Channel.open(ours), WorkerChannel(theirs)
        sending = asyncio.gather(channel.send("first"), channel.send(bytes(2**20)))
        assert await asyncio.to_thread(worker.receive) == "first"
        assert await asyncio.to_thread(worker.receive) == bytes(2**20)
        await sending
        worker.send({"reply": 1})
        assert await channel.receive() == {"reply": 1}
        channel.close()
        theirs.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_peer_that_is_gone_is_a_dead_worker_however_often_it_is_written_to(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Stopping a worker that had died at the start ended in uvloop's RuntimeError, which hid why it had died."""

    async def talk() -> None:
        ours, theirs = socket.socketpair()
        channel = await Channel.open(ours)
        theirs.close()
        with pytest.raises(WorkerDied):
            await channel.receive()
        for _ in range(3):
            with pytest.raises(WorkerDied):
                await channel.send("hello")
        channel.close()
        with pytest.raises(WorkerDied):
            await channel.send("hello")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())
