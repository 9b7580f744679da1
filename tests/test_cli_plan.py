"""`mmserve plan`: tables for people, one JSON object for programs, and what it says to nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmserve.__main__ import main


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert main(["plan", "--json", *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_tables_say_how_to_cut_the_box_up_what_is_refused_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rps", "250", "--mix", "blend", "--model", "llama-8b"]) == 0
    said = capsys.readouterr().out
    for words in ("7 small + 1 encoder", "6 small + 2 encoders", "refused", "4 boxes", "per 1,000", "KV cache", "446,208", "2,048"):
        assert words in said


def test_json_has_the_figures_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = planned(capsys, "--rps", "600", "--price-per-gpu-hour", "3")
    assert sheet["best"] == "7 small + 1 encoder"
    assert sheet["num_boxes"] == 8
    assert sheet["usd_per_hour"] == 8 * 8 * 3
    one_box = sheet["one_box"]
    assert isinstance(one_box, dict)
    assert 0 < one_box["answered"] < 200 < one_box["offered"] == 600


def test_a_mix_is_shares_or_json_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mix.json").write_text('{"text": 3, "image": 1}')
    for mix in ("text=.75,image=.25", '{"text": 0.75, "image": 0.25}', str(tmp_path / "mix.json")):
        assert planned(capsys, "--rps", "10", "--mix", mix)["shares"] == {"text": 0.75, "image": 0.25}


def test_longer_texts_take_more_boxes_and_better_cards_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    boxes = [planned(capsys, "--rps", "500", "--mix", "text", *flags) for flags in (("--hardware", "h200"), (), ("--input-len", "2000"))]
    better, usual, longer = (int(str(sheet["num_boxes"])) for sheet in boxes)
    assert better < usual < longer


def test_a_model_directory_is_read_and_its_replicas_spread_as_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"model_type": "llama", "vocab_size": 32_064, "intermediate_size": 11_008}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    sheet = planned(capsys, "--rps", "20", "--model", str(tmp_path), "--tp", "2")
    assert str(sheet["best"]).endswith("small (tp 2) + 2 encoders")


def test_a_bench_of_this_machine_is_gone_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = {
        "mean_tpot_ms": 60.0, "output_throughput": 1000.0, "total_input_tokens": 60_500, "total_output_tokens": 25_000, "completed": 100,
        "duration": 25.0, "repeat_rate": 0.0,
    }  # fmt: skip
    (tmp_path / "bench.json").write_text("what the tool said before\n" + json.dumps(bench))
    slow = planned(capsys, "--rps", "50", "--bench", str(tmp_path / "bench.json"))["best_carries"]
    assert isinstance(slow, float)
    assert slow < 5.0


def test_what_no_number_of_boxes_carries_is_said_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-70b"]) == 1
    assert "TPOT p50, small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere"], "config.json"),
        (["--model", "llama-70b", "--tp", "1"], "no split"),
        (["--bench", "/nowhere.json"], "can't be read"),
    ],
)
def test_what_cannot_be_planned_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--rps", "0"], ["--mix", "video=1"], ["--mix", "{"], ["--large-share", "1"], ["--gpus", "0"]])
def test_flags_out_of_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *flags])
    assert flags[0] in capsys.readouterr().err
