"""`python -m mmserve`: the command line.  Without a command it serves, so that flags alone will do."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

COMMANDS = {
    "serve": "serve a model over HTTP (the default command)",
    "check": "say what a model directory is, whether it loads, and what it needs",
    "chat": "talk to a running server in the terminal",
    "tenants": "say who may use a server, and how much",
    "canary": "say what became of a second set of weights that was tried, or end its trial",
    "usage": "say what was used and what it cost, by tenant, day and modality",
    "bench": "measure any OpenAI-compatible server under load",
    "plan": "say how many GPUs a rate takes, how to cut a box up for it, and what it costs",
    "eval": "measure whether its answers are true, and gate deploys on it",
}
_DEFAULT = "serve"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status.  Only the command that is asked for is imported."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, _DEFAULT)
    parser = argparse.ArgumentParser(prog="mmserve", description="A multi-modal inference server: text, images and audio in, text out.")
    parser.add_argument("--version", action="version", version=f"mmserve {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if name == words[0]:
            module = importlib.import_module(f"mmserve.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(words)
    status: int = args.run(args)
    return status


def _version() -> str:
    try:
        return metadata.version("mmserve")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "of this checkout"


if __name__ == "__main__":
    sys.exit(main())
