#!/usr/bin/env bash
# Hands the fused exports of mixture adapters to PEFT and transformers 5.
#
#   tests/peers/fused.sh target/release/ft
#
# Makes a virtual environment under target/ (large: it installs PyTorch), or uses the one whose interpreter PEERS_PYTHON
# names. Prints one line an adapter: how far its logits are from PyTorch's, and how far the adapter moves them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { echo "usage: tests/peers/fused.sh FT" >&2; exit 2; }
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$(cd "$here/../.." && pwd)/target/peers5-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing PyTorch, transformers and PEFT into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check \
            torch==2.11.0 transformers==5.23.0 peft==0.21.2 numpy safetensors==0.8.0
        touch "$venv/.ready"
    fi
fi
PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false exec "$python" "$here/fused.py" "$(realpath "$1")"
