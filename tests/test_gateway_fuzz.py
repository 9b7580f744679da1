"""Whatever is sent: a value or an error that is the client's.  Nothing else ever comes out of the four doors, nor of a server.

A few inputs of each kind; `python -m scripts.fuzz` sends the same ones by the hundred thousand.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fake_engine import ForgetfulEngine
from gateway_client import serving

from mmserve.media import MediaKind
from scripts.fuzz import Record, fuzz
from scripts.fuzzing import containers, corpus, doors
from scripts.fuzzing.doors import DOORS, Door, Finding, JsonDoor, MediaDoor, UriDoor, Wire, make_input

NUM_INPUTS = {"json": 2_000, "uri": 2_000, "image": 400, "audio": 400}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DOORS)
async def test_any_input_is_taken_or_is_the_clients_error(name: str, seed: int) -> None:
    async with AsyncExitStack() as stack:
        door: Door = JsonDoor() if name == "json" else UriDoor()
        if name in ("image", "audio"):
            door = await stack.enter_async_context(MediaDoor.open(MediaKind(name)))
        outcomes = set()
        for index in range(NUM_INPUTS[name]):
            data, rng = make_input(name, seed, index)
            try:
                outcomes.add(await door.try_one(data, rng))
            except Exception as error:
                error.add_note(f"python -m scripts.fuzz --door {name} --seed {seed} --first {index} --inputs 1")
                raise
    assert {"200", "400" if name in ("json", "uri") else "422"} <= outcomes


@pytest.mark.parametrize("name", DOORS)
async def test_any_input_over_the_wire_is_answered_in_the_servers_own_words(name: str) -> None:
    async with serving(ForgetfulEngine()) as server:
        wire = Wire(server.url, server.http)
        outcomes = {await wire.send(name, *make_input(name, 0, index)) for index in range(150)}
    assert outcomes <= {"wire 200", "wire 400", "wire 404", "wire 415", "wire 422"}
    assert len(outcomes) > (name in ("json", "uri"))


def test_an_input_is_the_same_in_every_run() -> None:
    for name in DOORS:
        assert make_input(name, 7, 3)[0] == make_input(name, 7, 3)[0] != make_input(name, 7, 4)[0]


@pytest.mark.parametrize(("split", "join", "data"), [
    (containers.split_png, containers.join_png, corpus.pictures()[2]),
    (containers.split_jpeg, containers.join_jpeg, corpus.pictures()[0]),
    (containers.split_riff, containers.join_riff, corpus.pictures()[4]),
    (containers.split_ogg, containers.join_ogg, next(data for data in corpus.clips() if data.startswith(b"OggS"))),
    (containers.split_flac, containers.join_flac, next(data for data in corpus.clips() if data.startswith(b"fLaC"))),
])  # fmt: skip
def test_a_container_put_together_again_is_the_container(split: containers.Split, join: containers.Join, data: bytes) -> None:
    """Else every damaged file would be refused for its shell, and no decoder ever reached."""
    assert len(split(data)) > 1
    assert join(split(data)) == data


async def test_a_parser_that_breaks_is_found_and_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    record = Record(tmp_path, "json", seed=0, first=0)
    monkeypatch.setattr(doors, "parse_chat", broken)
    await fuzz(record, 4, wire_every=0)
    (cause,) = record.findings
    assert cause.startswith("KeyError at test_gateway_fuzz.py:")
    assert (record.findings[cause], record.next_index) == (4, 4)
    kept = sorted((tmp_path / "findings").iterdir())
    assert [path.name for path in kept] == ["json-0-0.bin", "json-0-0.txt"]
    assert kept[0].read_bytes() == make_input("json", 0, 0)[0]
    assert Record(tmp_path, "json", seed=0, first=0).as_json() == record.as_json()  # a later run goes on there


async def test_another_value_than_the_oracles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "parse_data_uri", lambda uri, param: ("", b"guessed"))
    with pytest.raises(Finding, match="oracle"):
        await UriDoor().try_one(b"data:;base64,AAAA", random.Random())
