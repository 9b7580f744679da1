"""The floors of the house, read from the imports themselves: they go down only, and torch stays in the basement."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mmserve

ROOT = Path(mmserve.__file__).parent
MAX_LINES = 500

# room -> the rooms it may import; a room may always import itself
VOCABULARY = {
    "errors", "config", "composition", "media", "request", "plan", "shared_buffer", "transport", "child_process", "metrics", "clock",
    "roofline",
}  # fmt: skip
ENGINE = {
    "engine", "sync_engine", "active_request", "background", "costs", "request_records", "decoder_group", "decoder_groups", "decoder_specs",
    "replica_set", "replica", "supervisor", "media_service", "media_room", "encoder_lanes", "supervised_encoder", "tokenizer",
    "chat_template", "token_fuser", "prompt_maker", "modality_router", "model_router", "request_router", "route_classifier",
    "escalation", "doubt", "loop_lag", "token_stream", "readiness", "quarantine",
    "quota", "tenants", "tenant_watch", "ledger", "ledger_tables", "spool", "usage", "hit_watch", "grounding", "guardrail",
    "answer_quality", "rate_watch", "recent_answers", "canary", "canary_records", "canary_shadows", "canaries", "media_fetches",
}  # fmt: skip
DOORS = {"__main__", "cli", "gateway", "bench", "evals"}
BASEMENT = {
    "worker", "models", "encoders.vision_tower", "encoders.audio_tower", "encoders.qwen2_audio_tower", "encoders.ultravox_tower",
    "encoders.qwen2_5_omni_towers",
}  # fmt: skip
MAY_IMPORT = {
    **dict.fromkeys(VOCABULARY, VOCABULARY),
    "paged_kv": VOCABULARY,
    "scheduler": VOCABULARY | {"paged_kv"},
    "encoders": VOCABULARY,
    "planner": VOCABULARY | {"scheduler"},
    **dict.fromkeys(ENGINE, VOCABULARY | {"paged_kv", "scheduler", "encoders"} | ENGINE),
    **dict.fromkeys(DOORS, VOCABULARY | ENGINE | DOORS | {"planner"}),
    **dict.fromkeys(BASEMENT, VOCABULARY | BASEMENT),
    "sim": VOCABULARY | {"worker"},
}
PURE = {
    "paged_kv", "scheduler", "planner", "roofline", "quota", "token_fuser", "modality_router", "model_router", "quarantine", "hit_watch",
    "grounding", "rate_watch", "recent_answers", "costs", "canary",
    "route_classifier", "request_router", "doubt",
}  # fmt: skip
NOT_PURE = {"asyncio", "socket", "subprocess", "threading", "time", "torch", "transformers"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"  # public names only, imported when first used
}


def room_of(module: str) -> str:
    """`encoders.image` -> encoders; the towers are rooms of their own."""
    return module if module in BASEMENT else module.partition(".")[0]


def imports_of(path: Path) -> Iterator[str]:
    """Everything imported anywhere in the file, inside functions and under TYPE_CHECKING too, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported_by(path: Path) -> set[str]:
    """Modules of the house that the file imports, without the leading `mmserve.`."""
    found = set()
    for name in imports_of(path):
        if name == "mmserve" or name.startswith("mmserve."):
            inner = name.removeprefix("mmserve").removeprefix(".")
            while inner and inner not in MODULES:
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found - {""}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    room = room_of(module)
    assert room in MAY_IMPORT, f"{module} has no floor yet: give it one here and in the docstring of mmserve"
    allowed = MAY_IMPORT[room] | {room}
    above = {name for name in modules_imported_by(MODULES[module]) if room_of(name) not in allowed}
    assert not above, f"{module} reaches up or aside to {sorted(above)}"


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {module: modules_imported_by(path) - {module} for module, path in MODULES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, naming the circle


def test_torch_is_imported_in_the_basement_only_and_by_the_supervisor() -> None:
    heavy = {"torch", "transformers", "flash_attn"}
    users = {module for module, path in MODULES.items() if any(name.partition(".")[0] in heavy for name in imports_of(path))}
    assert {module for module in users if room_of(module) not in BASEMENT} <= {"supervisor"}


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) in PURE])
def test_books_and_plans_know_no_clock_no_loop_and_no_device(module: str) -> None:
    assert not {name.partition(".")[0] for name in imports_of(MODULES[module])} & NOT_PURE


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    assert not tree.body or ast.get_docstring(tree)


def test_every_room_stands_in_the_docstring_of_the_package() -> None:
    plan = mmserve.__doc__ or ""
    rooms = {room_of(module).replace(".", "/") for module in MODULES}
    assert not {room for room in rooms if room not in plan}


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_longer_than_500_lines(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("modules", ["mmserve.engine", "mmserve.gateway.app", "mmserve.cli.serve, mmserve.__main__"])
def test_the_main_process_comes_up_without_torch(modules: str) -> None:
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
