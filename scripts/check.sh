#!/usr/bin/env bash
# Format, lint, types, tests: what CI runs, in the order in which it is cheapest to fail.  Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE  # the tests' many processes must not spin against each other

"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
"$python" -m pytest -q --durations=5 "$@"
