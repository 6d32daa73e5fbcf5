#!/bin/sh
# Runs the tests of one engine in its own virtual environment, which is made first.
#
#     tests/engines/run.sh vllm
#
# Where the engine's wheels cannot be had, it says so and skips; with CI=strict that is a failure.
set -eu
engine=${1:?usage: run.sh ENGINE}
cd "$(dirname "$0")/../.."
venv=.venv-engines/$engine
folder=tests/engines/$engine
stamp=$venv/.installed
if [ ! -e "$stamp" ] || [ -n "$(find "$folder" pyproject.toml -maxdepth 1 \( -name 'install.sh' -o -name 'constraints*' \
    -o -name pyproject.toml \) -newer "$stamp")" ]; then
    echo "installing $engine into $venv ..."
    if ! "$folder/install.sh" "$venv"; then
        if [ "${CI:-}" = strict ]; then
            echo "FAILED: $engine cannot be installed here, see the lines above"
            exit 1
        fi
        echo "SKIPPED: tests of $engine: it cannot be installed here, see the lines above"
        exit 0
    fi
    touch "$stamp"
fi
exec "$venv/bin/python" -m pytest --timeout 1500 "$folder"
