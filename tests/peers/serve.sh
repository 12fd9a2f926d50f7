#!/usr/bin/env bash
# Asks `ft serve` with OpenAI's own Python client.
#
#   tests/peers/serve.sh target/release/ft
#
# Makes a virtual environment under target/ (small), or uses the one whose interpreter PEERS_PYTHON names.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { echo "usage: tests/peers/serve.sh FT" >&2; exit 2; }
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$(cd "$here/../.." && pwd)/target/peers-openai-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing openai into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check openai==3.54.0
        touch "$venv/.ready"
    fi
fi
PYTHONDONTWRITEBYTECODE=1 exec "$python" "$here/serve.py" "$(realpath "$1")"
