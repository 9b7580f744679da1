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


async def test_requests_that_leave_in_the_same_instant_take_no_room_with_them():
    """A soak's storm of cancellations: the first to hear of it offered the room to the next, which had left but not heard of it yet.

    That was an InvalidStateError, and the room was gone for good.
    """
    room = MediaRoom(10)
    await room.take(8)
    leaving = [asyncio.create_task(room.take(9)), asyncio.create_task(room.take(2)), asyncio.create_task(room.take(1))]
    staying = asyncio.create_task(room.take(2))
    await settle()
    for task in leaving:
        task.cancel()
    left = await asyncio.gather(*leaving, return_exceptions=True)
    assert [type(error) for error in left] == [asyncio.CancelledError] * 3
    await asyncio.wait_for(staying, 5)
    room.give_back(8)
    room.give_back(2)
    await asyncio.wait_for(room.take(10), 5)


async def test_room_is_not_offered_to_a_request_that_has_left_and_not_heard_of_it():
    room = MediaRoom(10)
    await room.take(10)
    leaving, staying = asyncio.create_task(room.take(10)), asyncio.create_task(room.take(3))
    await settle()
    leaving.cancel()
    room.give_back(10)
    await asyncio.wait_for(staying, 5)
    await asyncio.wait_for(room.take(7), 5)


async def test_room_given_to_a_request_that_just_left_comes_back():
    room = MediaRoom(10)
    await room.take(10)
    late = asyncio.create_task(room.take(10))
    await settle()
    room.give_back(10)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await asyncio.wait_for(room.take(10), 5)
