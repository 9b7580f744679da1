import asyncio

from mmserve.media_room import MediaRoom


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_room_is_given_in_the_order_it_was_asked_for():
    """A small request behind a large one must not keep the large one waiting for ever."""
    room = MediaRoom(10)
    await room.take(8)
    order = []
    large = asyncio.create_task(room.take(9))
    await settle()
    large.add_done_callback(lambda _: order.append("large"))
    small = asyncio.create_task(room.take(1))
    small.add_done_callback(lambda _: order.append("small"))
    await settle()
    assert order == []
    room.give_back(8)
    await settle()
    assert order == ["large", "small"]


async def test_a_request_that_leaves_the_queue_lets_the_next_one_in():
    room = MediaRoom(10)
    await room.take(8)
    large, small = asyncio.create_task(room.take(9)), asyncio.create_task(room.take(2))
    await settle()
    large.cancel()
    await asyncio.wait_for(small, 5)
    room.give_back(8)
    room.give_back(2)


async def test_room_given_to_a_request_that_just_left_comes_back():
    room = MediaRoom(10)
    await room.take(10)
    late = asyncio.create_task(room.take(10))
    await settle()
    room.give_back(10)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await asyncio.wait_for(room.take(10), 5)
