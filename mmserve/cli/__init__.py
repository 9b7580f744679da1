"""The commands: one small file each, with `add_arguments` and `run`.  `mmserve.__main__` finds them by name."""
