import asyncio
import gc
import os
import signal
import subprocess
import sys

import pytest

from mmserve.child_process import start_child
from mmserve.errors import WorkerDied
from mmserve.supervisor import Supervisor, Worker, WorkerFailedToStart, alone
from mmserve.transport import Channel


async def spawn(function: str, num_ranks: int = 1) -> Worker:
    worker = await Worker.spawn("test", f"fake_workers:{function}", [(rank,) for rank in range(num_ranks)])
    assert await worker.receive(30) == "ready"
    return worker


async def test_a_call_gets_its_own_reply():
    worker = await spawn("echo")
    assert await asyncio.gather(*(worker.call(n, 30) for n in range(20))) == list(range(20))
    await worker.stop(5)
    assert worker.died.is_set()


async def test_a_worker_that_does_not_answer_is_killed():
    worker = await spawn("hang")
    with pytest.raises(WorkerDied, match="hung"):
        await worker.call("anything", 0.2)
    await worker.died.wait()
    await worker.bury()


async def test_every_rank_gets_the_message_and_rank_0_answers():
    worker = await spawn("echo_rank", num_ranks=3)
    assert await worker.call("who", 30) == (0, "who")
    assert len(set(worker.pids)) == 3
    await worker.stop(5)


@pytest.mark.parametrize("victim", [0, 1])
async def test_ranks_die_together(victim: int):
    """A rank that lost another would wait in a collective for ever, and hold a GPU's memory meanwhile."""
    worker = await spawn("echo_rank", num_ranks=2)
    other = os.pidfd_open(worker.pids[1 - victim])
    os.kill(worker.pids[victim], signal.SIGKILL)
    await worker.died.wait()
    assert _wait_for_end(other), "a rank outlived its group"
    os.close(other)
    with pytest.raises(WorkerDied):
        await worker.call("anyone", 30)
    await worker.bury()


async def test_a_death_while_idle_is_noticed():
    worker = await spawn("echo")
    os.kill(worker.pid, signal.SIGKILL)
    await worker.died.wait()
    await worker.bury()


async def test_a_cancelled_call_leaves_no_reply_for_the_next():
    """A reply that stays in the channel would be handed to another caller: that worker's life is over."""
    worker = await spawn("hang")
    call = asyncio.create_task(worker.call("anything", 30))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await worker.died.wait()
    await worker.bury()


async def test_a_message_to_a_worker_that_is_gone_is_no_error_nobody_sees(caplog: pytest.LogCaptureFixture):
    """A step sent to a decoder that had just been killed as hung left a traceback in the log: nobody waits for the answer to that one."""
    worker = await spawn("echo")
    await worker.bury()
    reply = worker.send("too late", 30)
    assert reply.done()
    del reply
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


async def test_a_buried_worker_leaves_no_descriptor_open():
    """Each dead worker kept two pipes of multiprocessing's until the oldest garbage was collected, which is never while a server idles."""
    await (await spawn("echo")).stop(5)
    gc.collect()
    gc.disable()
    try:
        num_open = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await (await spawn("echo")).stop(5)
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        gc.enable()


async def test_a_killed_worker_is_followed_by_another():
    lives: asyncio.Queue[Worker] = asyncio.Queue()
    restarts = []

    async def serve(worker: Worker, ready: object) -> None:
        lives.put_nowait(worker)
        await worker.died.wait()
        raise WorkerDied("test")

    supervisor = Supervisor("test", "fake_workers:echo", alone(), serve, on_restart=restarts.append)
    await supervisor.first_ready()
    first = await lives.get()
    os.kill(first.pid, signal.SIGKILL)
    second = await lives.get()
    assert second.pid != first.pid
    assert await second.call("still here", 30) == "still here"
    assert restarts == ["test"]
    await supervisor.close()


async def test_an_error_in_what_serves_a_worker_ends_that_life_and_not_the_role():
    """An assertion in the books ended the supervisor's task, and all who waited for the worker waited for ever."""
    lives: asyncio.Queue[Worker] = asyncio.Queue()

    async def serve(worker: Worker, ready: object) -> None:
        lives.put_nowait(worker)
        if lives.qsize() == 1:
            raise ValueError("a mistake of ours")
        await worker.died.wait()
        raise WorkerDied("test")

    supervisor = Supervisor("test", "fake_workers:echo", alone(), serve, on_restart=lambda role: None)
    async with asyncio.timeout(60):
        while lives.qsize() < 2:
            await asyncio.sleep(0.01)
    first, second = lives.get_nowait(), lives.get_nowait()
    assert first.died.is_set()
    assert await second.call("still here", 30) == "still here"
    await supervisor.close()


async def test_a_worker_that_never_starts_is_an_error_and_not_a_loop():
    async def serve(worker: Worker, ready: object) -> None:
        raise AssertionError("it was never ready")

    supervisor = Supervisor("test", "fake_workers:die_at_once", alone(), serve, on_restart=lambda role: None)
    with pytest.raises(WorkerFailedToStart, match="test worker ended before it was ready"):
        await supervisor.first_ready()
    await supervisor.close()


async def test_a_child_does_not_import_the_script_that_started_it():
    """`with Engine() as engine:` at the top of a script, without a guard, must not start itself again in every worker."""
    process, end = start_child("fake_workers:report_main_module", (), "test")
    channel = await Channel.open(end)
    assert await channel.receive() == (None, signal.SIGKILL)
    process.join()
    channel.close()


def test_children_die_with_a_killed_parent():
    script = "import sys, time; sys.path.insert(0, 'tests')\nfrom mmserve.child_process import start_child\n" + (
        "process, end = start_child('fake_workers:echo', (), 'test')\nprint(process.pid, flush=True)\ntime.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    pidfd = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _wait_for_end(pidfd), "the child outlived its parent"
    os.close(pidfd)


def _wait_for_end(pidfd: int) -> bool:
    import select

    readable, _, _ = select.select([pidfd], [], [], 20)
    return bool(readable)


async def test_only_lives_without_an_answer_open_the_circuit():
    """Three kills of a busy decoder within a minute refused all requests, as if the model could not be loaded."""
    lives: asyncio.Queue[Worker] = asyncio.Queue()

    async def serve(worker: Worker, ready: object) -> None:
        lives.put_nowait(worker)
        await worker.died.wait()
        raise WorkerDied("test")

    supervisor = Supervisor("test", "fake_workers:echo", alone(), serve, on_restart=lambda role: None)
    for _ in range(4):
        worker = await lives.get()
        await worker.call("work", 30)
        os.kill(worker.pid, signal.SIGKILL)
    for _ in range(3):
        worker = await lives.get()
        assert not supervisor.broken
        os.kill(worker.pid, signal.SIGKILL)
    while not supervisor.broken:
        await asyncio.sleep(0.01)
    await supervisor.close()
