"""Things a maintainer runs from the repository root, as `python -m scripts.NAME`."""
