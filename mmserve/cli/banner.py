"""What the terminal shows when the server is ready: where it is, what it serves, and a line to copy."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mmserve.composition import Composition
from mmserve.config import Config


def banner(url: str, composition: Composition, config: Config, *, needs_key: bool) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("playground", Text(f"{url}/", style="bold cyan"))
    facts.add_row("OpenAI API", f"{url}/v1")
    facts.add_row("model", f"{config.model.served_model_name or composition.name} ({', '.join(composition.decoders)})")
    facts.add_row("takes", ", ".join(composition.modalities))
    facts.add_row("access", _access(config, needs_key=needs_key))
    stop = Text("Ctrl-C stops; what runs then may finish.", style="dim")
    panel = Panel(Group(facts, Text(), stop), title="[bold]mmserve[/]", title_align="left", expand=False)
    command = Text(example(url, needs_key=needs_key), no_wrap=True, overflow="ignore")  # a line that breaks can't be copied
    return Group(panel, command, Text())


def example(url: str, *, needs_key: bool) -> str:
    """A curl that works as it stands; the key is left for the reader to fill in, not shown."""
    key = ["-H 'Authorization: Bearer YOUR_KEY'"] if needs_key else []
    body = '{"messages": [{"role": "user", "content": "Hello! Who are you?"}], "stream": true}'
    return " \\\n  ".join([f"curl -N {url}/v1/chat/completions", *key, "-H 'Content-Type: application/json'", f"-d '{body}'"])


def _access(config: Config, *, needs_key: bool) -> str:
    if needs_key:
        return "with an API key"
    return "anybody who can reach it" if config.server.no_auth else "this machine only"
