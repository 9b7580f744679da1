"""The commands: one small file each, with `add_arguments` and `run`.  `mmserve.__main__` lists them and imports the one asked for."""
