#!/bin/sh
# A virtual environment that runs SGLang's cache on a machine without a GPU, 1.5 GB, for Python 3.11.
#
#     tests/engines/sglang/install.sh .venv-sglang
#
# SGLang itself comes without its dependencies: most of them need CUDA. The tests put stand-ins in the place of
# those that its cache only imports.
set -eu
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install -qq --disable-pip-version-check --no-warn-conflicts --constraint "$root/constraints.txt" \
    --constraint "$here/constraints-sglang.txt" --editable "${root}[codecs]" hypothesis pytest pytest-timeout \
    aiohttp dill einops fastapi opentelemetry-api orjson packaging pillow prometheus_client psutil pybase64 pyzmq \
    requests setproctitle tqdm
pip install -qq --disable-pip-version-check --no-deps "$(grep '^sglang==' "$here/constraints-sglang.txt")"
