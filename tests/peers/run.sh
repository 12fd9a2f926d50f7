#!/usr/bin/env bash
# Runs `ft` on the reference cases and hands what it wrote to transformers and PEFT.
#
#   tests/peers/run.sh target/release/ft [CASE ...]
#
# Makes a virtual environment under target/ (large: it installs PyTorch), or uses the one whose interpreter PEERS_PYTHON
# names. Prints one table; exits with 1 if any line of it failed. The versions are those of tests/fixtures/make.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -ge 1 ] || { echo "usage: tests/peers/run.sh FT [CASE ...]" >&2; exit 2; }
ft=$(realpath "$1")
shift
[ -x "$ft" ] || { echo "$ft is not a program; build it: cargo build --release" >&2; exit 2; }
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$root/target/peers-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing PyTorch, transformers and PEFT into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check \
            torch==2.11.0 transformers==4.57.1 peft==0.18.0 numpy safetensors==0.8.0
        touch "$venv/.ready"
    fi
fi
PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false exec "$python" "$here/check.py" "$ft" "$@"
