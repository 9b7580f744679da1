"""Lets schemathesis send what `/openapi.json` describes, and what it doesn't, to a real server over an engine that answers at once.

    python -m scripts.check_openapi [--max-examples 100] [--seed 0] [more of schemathesis's own flags]

No answer may be a 5xx, and every answer, refusals too, must be what the description says.  Exit status as schemathesis's own.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance"


async def check(max_examples: int, seed: int, more: Sequence[str] = ()) -> int:
    """Exit status of schemathesis."""
    sys.path.insert(0, str(TESTS))
    from fake_engine import ForgetfulEngine  # the tests' own, on the path only now
    from gateway_client import serving

    async with serving(ForgetfulEngine()) as server:
        with tempfile.TemporaryDirectory(prefix="mmserve-openapi-") as directory:  # for what it keeps of a run
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--no-color",
                "--max-examples", str(max_examples), "--seed", str(seed), *more, cwd=directory,
            )  # fmt: skip
            return await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=100, help="of each operation and phase")
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    return asyncio.run(check(options.max_examples, options.seed, more))


if __name__ == "__main__":
    sys.exit(main())
