"""`mmserve check DIR`: what a model directory is, whether it loads, and what it needs, without loading it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mmserve.child_process import start_child
from mmserve.composition import BadModel, Composition, DecoderSpec, load_composition
from mmserve.config import SchedulerConfig
from mmserve.media import MediaKind
from mmserve.roofline.timing import ACTIVATION_BYTES
from mmserve.shared_buffer import ITEM_SIZE
from mmserve.tokenizer import load_tokenizers
from mmserve.transport import WorkerChannel

SEQUENCE_TOKENS = 1000  # the sequence that capacity is counted in
_PICTURES = ((336, 336), (1024, 768), (768, 1024), (1920, 1080))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = SchedulerConfig()
    parser.add_argument("directory", type=Path, help="model directory of any supported format")
    parser.add_argument("--dtype", choices=list(ITEM_SIZE), default="bfloat16", help="of weights and KV cache (default bfloat16)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file that goes before the model's own chat template")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=int, default=defaults.kv_cache_memory_bytes, metavar="INT",
        help=f"KV cache per decoder (default {defaults.kv_cache_memory_bytes})",
    )  # fmt: skip
    parser.add_argument("--gpu-memory-gb", type=float, metavar="GB", help="count for a GPU of so many GB instead")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=defaults.gpu_memory_utilization, metavar="FLOAT",
        help=f"share of the GPU's memory that may be used (default {defaults.gpu_memory_utilization})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if the model would load, 1 with every problem otherwise."""
    console = Console(highlight=False)
    try:
        composition = load_composition(args.directory, chat_template=args.chat_template)
        load_tokenizers(composition)
    except BadModel as error:
        console.print(f"[bold red]can't be served:[/] {error.message}")
        return 1
    console.print(_facts(composition, args))
    problems = _dry_load(composition)
    for problem in problems:
        console.print(f"[bold red]does not load:[/] {problem}", soft_wrap=True)
    if not problems:
        console.print("[bold green]loads:[/] every tensor is there, and of the right shape")
    return 1 if problems else 0


def num_sequences(decoder: DecoderSpec, kv_bytes: float, dtype: str) -> int:
    """Sequences of SEQUENCE_TOKENS that a KV cache of `kv_bytes` holds, sharing nothing."""
    return max(0, int(kv_bytes // (decoder.kv_elements_per_token * ITEM_SIZE[dtype] * SEQUENCE_TOKENS)))


def weight_bytes(composition: Composition, dtype: str) -> dict[str, int]:
    """Memory of each part's weights once they are loaded; a tower that serves two decoders counts once."""
    parts = {f"{name} decoder": decoder.weights for name, decoder in composition.decoders.items()}
    for kind in MediaKind:
        for name, spec in composition.encoders(kind).items():
            parts[f"{kind.value} encoder"] = spec.weights
            parts[f"{kind.value} projector of {name}"] = spec.projectors[name]
    elements = {name: sum(header.num_elements for header in weights.headers().values()) for name, weights in parts.items()}
    return {name: ITEM_SIZE[dtype] * count for name, count in elements.items() if count}


def _facts(composition: Composition, args: argparse.Namespace) -> Table:
    table = Table(title=composition.name, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    weights = weight_bytes(composition, args.dtype)
    for part, num_bytes in weights.items():
        table.add_row(part, f"{_size(num_bytes)} in {args.dtype}")
    kv_bytes, where = args.kv_cache_memory_bytes, f"a KV cache of {_size(args.kv_cache_memory_bytes)}"
    if args.gpu_memory_gb is not None:
        kv_bytes = args.gpu_memory_gb * 1e9 * args.gpu_memory_utilization - sum(weights.values()) - ACTIVATION_BYTES
        where = f"a GPU of {args.gpu_memory_gb:g} GB with everything on it"
    for name, decoder in composition.decoders.items():
        per_token = decoder.kv_elements_per_token * ITEM_SIZE[args.dtype]
        table.add_row(f"{name}: type", str(decoder.config["model_type"]))
        table.add_row(f"{name}: takes", ", ".join(composition.modalities_of(name)))
        table.add_row(f"{name}: context", f"{decoder.max_model_len} tokens")
        table.add_row(f"{name}: chat template", "yes" if decoder.prompt.chat_template is not None else "no: raw prompts only")
        table.add_row(f"{name}: KV cache", f"{_size(per_token)} a token")
        table.add_row(f"{name}: fits", f"{num_sequences(decoder, kv_bytes, args.dtype)} sequences of {SEQUENCE_TOKENS} tokens in {where}")
        if name in composition.vision:
            fit = composition.vision[name].fit
            table.add_row(f"{name}: a picture", ", ".join(f"{w}x{h}: {fit.num_rows(w, h)}" for w, h in _PICTURES) + " tokens")
        if audio := composition.audio.get(name):
            table.add_row(f"{name}: ten seconds of sound", f"{audio.num_rows(10 * audio.sample_rate)} tokens")
    return table


def _dry_load(composition: Composition) -> tuple[str, ...]:
    process, end = start_child("mmserve.worker.dry_load:run", (composition,), "mmserve-check")
    try:
        problems: tuple[str, ...] = WorkerChannel(end).receive()
    except EOFError:
        problems = ("the process that tried ended early; its words are above",)
    finally:
        end.close()
    process.join()
    return problems


def _size(num_bytes: float) -> str:
    """In binary units, three digits."""
    power = 0 if num_bytes < 1 else min(int(math.log2(num_bytes)) // 10, 4)
    return f"{num_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
