"""Settings as small frozen dataclasses.  Command-line flags and TOML keys are made from their fields, so the three can't disagree.

A field `max_num_seqs` is the flag `--max-num-seqs` and the key `max-num-seqs`.  A room is given its own section, never the whole house.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.errors import MmserveError
from mmserve.media import MediaLimits
from mmserve.request import GUARDRAIL_MODES

GPU_TPOT_TARGET_MS = 35.0
CPU_TPOT_TARGET_MS = 1000.0
GPU_QUEUE_WAIT_S = 0.3  # leaves time for an encode and a prefill before a first token is late
FLASH_BLOCK_SIZE = 256  # what flash-attn 2 reads by one table look-up
CANARY_SUFFIX = "-canary"  # behind a decoder's name: what stands beside it
CANARY_MODES = ("traffic", "shadow")
TORCH_BLOCK_SIZE = 16  # the stride of the prefix cache's hashes: the least waste


class ConfigError(MmserveError):
    """A setting is unknown or out of range.  Seen by whoever starts the server, never by a client."""


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, short: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "short": short})


@dataclass(frozen=True)
class ModelConfig:
    model: Path | None = option(None, "model directory of any supported format; the bundled mmserve-tiny by default")
    small: Path | None = option(None, "model directory of the small decoder and its encoders")
    large: Path | None = option(None, "model directory of the large decoder and its encoders")
    chat_template: Path | None = option(None, "Jinja file that goes before the model's own chat template")
    router: Path | None = option(None, "what decides between small and large for model auto; router.json of the model directory by default")
    escalation: bool = option(True, "let the large decoder answer where the small one begins uncertainly, if router.json says when that is")
    served_model_name: str | None = option(None, "name in /v1/models; the model's own by default")
    device: str = option("auto", "where workers run", choices=("auto", "cpu", "cuda", "sim:a100", "sim:h200"))
    dtype: str = option(
        "auto",
        "weights and KV cache; a CPU that can't multiply halves keeps only the weights in them",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int = option(0, "default sampling seed for requests that give none is drawn from this")
    tensor_parallel_size: int = option(1, "devices that share each replica of the large decoder, or of the only one", short="-tp")
    small_tensor_parallel_size: int = option(1, "the same for the small decoder beside a large one")
    small_devices: str | None = option(
        None, "devices of the small decoder: 2,3 or 4-7; on the CPU only their number counts; one replica by default"
    )
    large_devices: str | None = option(None, "devices of the large decoder")
    vision_devices: str = option("0", "devices of the vision encoder")
    audio_devices: str = option("0", "devices of the audio encoder")
    sim_small: str = option("llama-8b", "what the small decoder's simulated devices pretend to hold", choices=("llama-8b", "llama-70b"))
    sim_large: str = option(
        "llama-8b", "the same for the large decoder; a 70B needs -tp 4, or -tp 2 on an h200", choices=("llama-8b", "llama-70b")
    )
    worker_threads: int = option(0, "compute threads of each worker on the CPU; 0: the cores shared out")


@dataclass(frozen=True)
class SchedulerConfig:
    max_model_len: int | None = option(None, "tokens of prompt and answer together; the model's own limit by default")
    max_num_seqs: int = option(128, "sequences in one step")
    max_num_batched_tokens: int = option(1024, "tokens in one step: prefill is cut into chunks of at most this")
    tpot_target_ms: float | None = option(
        None, "time per output token: beside running answers, prefill is cut so that steps take no longer; 35 on GPUs, 1000 on the CPU"
    )
    block_size: int = option(0, "tokens in a physical KV block; 0: what the attention takes, 256 with flash-attn and 16 without")
    kv_cache_memory_bytes: int = option(512 * 2**20, "KV cache on the CPU, per decoder worker")
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory for weights, activations and KV cache")
    enable_prefix_caching: bool = option(True, "share the KV blocks of equal prefixes")
    max_num_queued_reqs: int = option(512, "requests waiting for a first step, beyond which new ones get 503")
    max_queue_wait_s: float | None = option(
        None, "seconds that a first step may foreseeably be waited for, beyond which new requests get 503; 0.3 on GPUs, any on the CPU"
    )


@dataclass(frozen=True)
class EncoderConfig:
    micro_batch_window_ms: float = option(12.0, "how long the first picture of a batch waits for others")
    max_encoder_batch: int = option(0, "pictures or audio windows in one forward pass; 0: 48 on a GPU, 1 on the CPU, where more only wait")
    shared_buffer_bytes: int = option(512 * 2**20, "host memory for pixels, samples and embedding rows: the cache's memory tier")
    decode_processes: int = option(1, "processes that decode pictures and clips")
    vision_url: str | None = option(None, "hosted encoder for pictures, instead of workers here: see docs/hosted_encoder.md")
    vision_version: str | None = option(None, "what the hosted encoder calls its weights; needed with vision-url")
    audio_url: str | None = option(None, "hosted encoder for clips")
    audio_version: str | None = option(None, "what the hosted encoder of clips calls its weights; needed with audio-url")
    hosted_encoder_key: str | None = option(None, "bearer token for hosted encoders")
    hosted_encoder_timeout_s: float = option(10.0, "how long a hosted encoder may take for an item")
    hosted_encoder_concurrency: int = option(16, "items that a hosted encoder has at once")


@dataclass(frozen=True)
class StorageConfig:
    data_dir: Path | None = option(None, "ledger and disk cache; ~/.cache/mmserve by default")
    embedding_disk_bytes: int = option(2 * 2**30, "disk tier of the embedding cache; 0 turns it off")
    image_ttl_s: float = option(24 * 3600.0, "how long a picture's rows are kept")
    audio_ttl_s: float = option(3600.0, "how long a clip's rows are kept")

    @property
    def directory(self) -> Path:
        return self.data_dir or Path.home() / ".cache" / "mmserve"

    @property
    def ledger(self) -> Path:
        return self.directory / "ledger.db"


@dataclass(frozen=True)
class GuardrailConfig:
    guardrail: str = option(
        "off",
        "what is done about objects in an answer that the vision side didn't see, where a request doesn't say",
        choices=GUARDRAIL_MODES,
    )
    guardrail_table: Path | None = option(None, "TOML file with a [guardrail] table, for a model that brings none")
    grounding_sample: float = option(0.05, "share of answers about pictures that are looked at afterwards, for metrics alone")


@dataclass(frozen=True)
class CanaryConfig:
    """A second set of weights for a decoder, tried beside it: see docs/canary.md."""

    canary_small: Path | None = option(None, "model directory whose small decoder and encoders are tried beside the server's own")
    canary_large: Path | None = option(None, "the same for the large decoder")
    canary_mode: str = option(
        "traffic", "whether clients get a canary's answers, or it answers their questions afterwards and unseen", choices=CANARY_MODES
    )
    canary_share: float = option(0.05, "share of a decoder's conversations that its canary gets")
    canary_margin: float = option(0.03, "how much more often a canary's answers may go wrong, as a share of them")
    canary_disagreement: float = option(0.2, "share of a shadow's short greedy answers that may differ from what clients are told")
    canary_devices: str | None = option(None, "devices of a canary, its own alone on GPUs: as many as share a replica of its decoder")


@dataclass(frozen=True)
class CostConfig:
    """The defaults are what an A100-80GB rents for, about.  A worker on the CPU counts as one GPU."""

    price_per_gpu_hour: float = option(2.0, "USD that an hour of one GPU costs, for what is said of the cost of requests")
    small_price_per_gpu_hour: float | None = option(None, "the same for devices of the small decoder, where they cost something else")
    large_price_per_gpu_hour: float | None = option(None, "the same for devices of the large decoder")
    vision_price_per_gpu_hour: float | None = option(None, "the same for devices of the vision encoder")
    audio_price_per_gpu_hour: float | None = option(None, "the same for devices of the audio encoder")


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    api_key: str | None = option(None, "key that clients must send as a bearer token")
    no_auth: bool = option(False, "allow listening beyond loopback without a key")
    max_body_bytes: int = option(32 * 2**20, "largest request body")
    max_bodies_bytes: int = option(512 * 2**20, "request bodies, and the media of requests not yet answered, all together; beyond that 503")
    body_timeout_s: float = option(30.0, "how long a request body may take to arrive")
    min_body_rate: int = option(1024, "bytes a second that a request body must come at, over any five seconds")
    max_connections: int = option(0, "connections at once; 0: the limit of open files, less 200")
    idle_connection_s: float = option(15.0, "how long a connection may bring no whole request")
    slow_client_s: float = option(30.0, "a client that reads nothing of its answer for this long is cut off")
    max_backlog_bytes: int = option(64 * 2**10, "text of one stream that may wait for its reader; beyond that it is cut off")
    keep_alive_s: float = option(10.0, "a comment line is streamed when nothing was sent for this long")
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    log_level: str = option("info", "how much is logged", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    guardrail: GuardrailConfig = field(default_factory=GuardrailConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: MediaLimits = field(default_factory=MediaLimits)


@dataclass(frozen=True)
class Flag:
    """One setting as the command line and TOML see it."""

    section: str  # field of Config
    field: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None
    short: str | None

    @property
    def key(self) -> str:
        return self.field.replace("_", "-")


def flags() -> Iterator[Flag]:
    """Every setting, in the order the sections are written."""
    for section in dataclasses.fields(Config):
        owner = typing.get_type_hints(Config)[section.name]
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            yield Flag(
                section.name, item.name, _plain(hints[item.name]), item.default,
                item.metadata.get("help", ""), item.metadata.get("choices"), item.metadata.get("short"),
            )  # fmt: skip


def from_mapping(values: Mapping[str, Any]) -> Config:
    """A Config from `{key: value}`, keys spelt as in TOML.  Raises ConfigError naming the key."""
    sections: dict[str, dict[str, Any]] = {}
    known = {flag.key: flag for flag in flags()}
    for key, value in values.items():
        flag = known.get(key.replace("_", "-"))
        if flag is None:
            raise ConfigError(f"unknown setting {key}", param=key)
        sections.setdefault(flag.section, {})[flag.field] = _convert(flag, value)
    hints = typing.get_type_hints(Config)
    return Config(**{section: hints[section](**fields) for section, fields in sections.items()})


def parse_devices(text: str) -> tuple[int, ...]:
    """`2,3` -> (2, 3); `4-7` -> (4, 5, 6, 7).  Raises ConfigError."""
    devices: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            devices.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"devices must look like 0, 2,3 or 4-7, got {text!r}") from None
    if not devices or len(set(devices)) != len(devices):
        raise ConfigError(f"devices must be distinct and at least one, got {text!r}")
    return tuple(devices)


def chosen_device(wanted: str) -> str:
    """cpu, cuda or a simulated card.  Asks the driver's own device files, since this process never loads torch."""
    has_cuda = Path("/dev/nvidiactl").exists()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("device cuda was asked for, but this machine shows no NVIDIA device", param="device")
    return ("cuda" if has_cuda else "cpu") if wanted == "auto" else wanted


def device_names(text: str, device: str) -> tuple[str, ...]:
    """`2,3` on CUDA is cuda:2 and cuda:3; on the CPU it's two workers that share it."""
    return tuple("cpu" if device == "cpu" else f"{device}:{index}" for index in parse_devices(text))


def is_simulated(device: str) -> bool:
    return device.startswith("sim:")


def worker_module(device: str) -> str:
    """Where the entry points of this device's worker processes are."""
    return "mmserve.sim.workers" if is_simulated(device) else "mmserve.worker.main"


def tpot_target_ms(wanted: float | None, device: str) -> float:
    """On a CPU small pieces of prompts cost a fifth of the throughput, and a decode step alone may take longer than a GPU's target."""
    return wanted if wanted is not None else CPU_TPOT_TARGET_MS if device == "cpu" else GPU_TPOT_TARGET_MS


def max_queue_wait_s(wanted: float | None, device: str) -> float:
    """Who comes to a GPU expects an answer that begins within a second; who tries a CPU expects one at all."""
    return wanted if wanted is not None else math.inf if device == "cpu" else GPU_QUEUE_WAIT_S


def replica_devices(text: str | None, device: str, num_ranks: int, key: str) -> tuple[tuple[str, ...], ...]:
    """Devices of each replica's ranks: `2-5` with two ranks each is (cuda:2, cuda:3) and (cuda:4, cuda:5).  Raises ConfigError."""
    if num_ranks < 1:
        raise ConfigError(f"a replica has at least one rank, got {num_ranks}", param=key)
    names = device_names(text or f"0-{num_ranks - 1}", device)
    if len(names) % num_ranks:
        raise ConfigError(f"{key} must name a multiple of {num_ranks} devices, as many as share a replica; got {len(names)}", param=key)
    return tuple(names[i : i + num_ranks] for i in range(0, len(names), num_ranks))


def kv_block_size(wanted: int, device: str, dtype: str) -> int:
    """Tokens in a physical KV block: `wanted`, or for 0 what attention on this device takes.  Raises ConfigError.

    Main keeps the books of blocks and never loads torch, so it asks here and not the backend.
    """
    if is_simulated(device):
        return wanted or FLASH_BLOCK_SIZE
    uses_flash = device.startswith("cuda") and dtype in ("float16", "bfloat16") and has_flash_attn()
    unit = FLASH_BLOCK_SIZE if uses_flash else TORCH_BLOCK_SIZE
    if wanted < 0 or wanted % unit:
        reader = "flash-attn" if uses_flash else "the prefix cache"
        raise ConfigError(f"block-size must be a multiple of {unit} for {reader}, got {wanted}", param="block-size")
    return wanted or unit


@functools.cache
def has_flash_attn() -> bool:
    """Whether the distribution is installed, without importing it."""
    try:
        importlib.metadata.distribution("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _convert(flag: Flag, value: Any) -> Any:
    if value is None:
        return flag.default
    if flag.type is bool and not isinstance(value, bool):
        raise ConfigError(f"{flag.key} must be true or false, got {value!r}", param=flag.key)
    if isinstance(value, bool) and flag.type is not bool:
        raise ConfigError(f"{flag.key} must be of type {flag.type.__name__}, got {value!r}", param=flag.key)
    try:
        converted = flag.type(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{flag.key} must be of type {flag.type.__name__}, got {value!r}", param=flag.key) from None
    if isinstance(converted, float) and not 0 <= converted < math.inf:
        raise ConfigError(f"{flag.key} must be a number that is not below zero, got {value!r}", param=flag.key)
    if flag.choices is not None and converted not in flag.choices:
        raise ConfigError(f"{flag.key} must be one of {', '.join(flag.choices)}, got {value!r}", param=flag.key)
    return converted


def _plain(hint: Any) -> type:
    """`Path | None` -> Path."""
    if isinstance(hint, types.UnionType):
        (hint,) = [part for part in typing.get_args(hint) if part is not type(None)]
    assert isinstance(hint, type)
    return hint
