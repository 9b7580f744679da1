"""Flags, TOML and environment: one set of settings, and who wins."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from mmserve.__main__ import main
from mmserve.cli.banner import example
from mmserve.cli.settings import add_settings, read_settings
from mmserve.config import Config, ConfigError, flags, max_queue_wait_s


def settings(*words: str, environ: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return read_settings(parser.parse_args(words), environ or {})


def test_no_flags_are_the_defaults() -> None:
    assert settings() == Config()


def test_every_setting_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert {f"--{flag.key}" for flag in flags()} <= options


def test_flags_have_the_names_and_types_that_users_of_vllm_know() -> None:
    config = settings(
        "--host", "0.0.0.0", "--port", "9000", "--api-key", "k", "--served-model-name", "m", "--max-model-len", "2048", "--max-num-seqs",
        "8", "--max-num-batched-tokens", "256", "--block-size", "256", "--dtype", "float32", "--seed", "7", "--gpu-memory-utilization",
        "0.5", "--shutdown-timeout", "1.5", "--log-level", "debug", "--device", "cpu", "--max-num-queued-reqs", "3", "--data-dir", "/data",
        "--small-devices", "2,3", "--micro-batch-window-ms", "10", "--limit-mm-per-prompt", '{"image": 2, "audio": 0}',
    )  # fmt: skip
    assert (config.server.host, config.server.port, config.server.api_key, config.server.log_level) == ("0.0.0.0", 9000, "k", "debug")
    assert config.server.shutdown_timeout == 1.5
    assert (config.scheduler.max_model_len, config.scheduler.max_num_seqs, config.scheduler.block_size) == (2048, 8, 256)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_queued_reqs) == (256, 3)
    assert (config.model.served_model_name, config.model.dtype, config.model.seed, config.model.device) == ("m", "float32", 7, "cpu")
    assert (config.storage.data_dir, config.encoder.micro_batch_window_ms) == (Path("/data"), 10.0)
    assert (config.limits.max_images, config.limits.max_clips) == (2, 0)


def test_booleans_are_switches_in_the_direction_that_changes_something() -> None:
    assert settings("--no-auth").server.no_auth
    assert not settings("--no-enable-prefix-caching").scheduler.enable_prefix_caching


def test_a_flag_wins_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "mmserve.toml"
    file.write_text('port = 9001\nmax_num_seqs = 4\napi-key = "from file"\nlimit-mm-per-prompt = { image = 3 }\n')
    config = settings("--config", str(file), "--port", "9002", environ={"MMSERVE_API_KEY": "from environment"})
    assert (config.server.port, config.scheduler.max_num_seqs, config.server.api_key) == (9002, 4, "from file")
    assert (config.limits.max_images, config.limits.max_clips) == (3, 1)
    assert settings(environ={"MMSERVE_API_KEY": "from environment"}).server.api_key == "from environment"


def test_a_flag_that_says_the_default_still_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mmserve.toml"
    file.write_text("port = 9001\n")
    assert settings("--config", str(file), "--port", "8000").server.port == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 9001", "prot"),
        ("port = true", "port"),
        ("no-auth = 1", "no-auth"),
        ("log-level = 'loud'", "log-level"),
        ("[server]\nport = 1", "server"),
        ("port =", "TOML"),
        ("limit-mm-per-prompt = { video = 1 }", "limit-mm-per-prompt"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mmserve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        settings("--config", str(file))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        settings("--config", "nowhere.toml")


def test_a_server_beyond_loopback_without_a_key_exits_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MMSERVE_API_KEY", raising=False)
    assert main(["--host", "0.0.0.0", "--data-dir", str(tmp_path)]) == 2
    assert "--no-auth" in capsys.readouterr().err


def test_flags_alone_mean_serve_and_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--port", "many"])
    assert caught.value.code == 2
    assert "mmserve serve" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "chat" in capsys.readouterr().out


def test_the_curl_of_the_banner_never_shows_the_key() -> None:
    assert "Authorization" not in example("http://127.0.0.1:8000", needs_key=False)
    assert "Authorization: Bearer YOUR_KEY" in example("http://127.0.0.1:8000", needs_key=True)


def test_how_long_a_first_step_may_be_waited_for_depends_on_the_device_unless_it_is_said() -> None:
    assert max_queue_wait_s(None, "cpu") == math.inf
    assert max_queue_wait_s(None, "cuda") == max_queue_wait_s(None, "sim:a100") == 0.3
    assert max_queue_wait_s(settings("--max-queue-wait-s", "2").scheduler.max_queue_wait_s, "cpu") == 2.0
