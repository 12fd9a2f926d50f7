#!/usr/bin/env bash
# Hands what `ft quantize` writes, mixtures too, to transformers with bitsandbytes, and trains on it with PEFT.
#
#   tests/peers/four_bit.sh target/release/ft [CASE ...]
#
# Makes a virtual environment under target/ (large: it installs PyTorch), or uses the one whose interpreter PEERS_PYTHON
# names. Prints one line a model; exits with 1 if any failed. The versions are those of tests/fixtures/make_nf4.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 1 ] || { echo "usage: tests/peers/four_bit.sh FT [CASE ...]" >&2; exit 2; }
ft=$(realpath "$1")
shift
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$(cd "$here/../.." && pwd)/target/peers4bit-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing PyTorch, transformers, PEFT and bitsandbytes into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check \
            torch==2.11.0 transformers==4.57.1 peft==0.18.0 bitsandbytes==0.50.2 accelerate numpy safetensors==0.8.0
        touch "$venv/.ready"
    fi
fi
PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false exec "$python" "$here/four_bit.py" "$ft" "$@"
