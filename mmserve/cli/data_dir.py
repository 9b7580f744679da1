"""What the commands share that look after a server's data directory, whether it runs or not."""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from mmserve.cli.settings import read_toml
from mmserve.config import ConfigError, StorageConfig


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the server's; ~/.cache/mmserve by default")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's TOML file, for its data-dir")


def with_ledger(args: argparse.Namespace, what: str, work: Callable[[Path], None]) -> int:
    """Does `work` on the ledger of the directory that is named, or that the server's file names.

    Exit status 0, 2 for what can't be done, 1 if `what` can't be read or written just now.
    """
    console = Console(stderr=True, highlight=False)
    try:
        directory = args.data_dir
        if directory is None and args.config is not None and (named := read_toml(args.config).get("data-dir")) is not None:
            directory = Path(named)
        work(StorageConfig(data_dir=directory).ledger)
    except ConfigError as error:
        console.print(f"[bold red]mmserve:[/] {error.message}", soft_wrap=True)
        return 2
    except sqlite3.DatabaseError as error:
        console.print(f"[bold red]mmserve:[/] {what} can't be read or written: {error}", soft_wrap=True)
        return 1
    return 0
