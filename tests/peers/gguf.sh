#!/usr/bin/env bash
# Hands what `ft export --to gguf` writes to the Python package gguf.
#
#   tests/peers/gguf.sh target/release/ft [LLAMA.CPP]
#
# Makes a virtual environment under target/ (small), or uses the one whose interpreter PEERS_PYTHON names. With the folder of
# a llama.cpp (its convert_hf_to_gguf.py, convert_lora_to_gguf.py), each file is also held against what those scripts write:
# then the interpreter needs torch, transformers and sentencepiece too. Exits with 1 if a line failed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 1 ] || { echo "usage: tests/peers/gguf.sh FT [LLAMA.CPP]" >&2; exit 2; }
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$(cd "$here/../.." && pwd)/target/peers-gguf-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing gguf into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check gguf==0.19.0 numpy
        touch "$venv/.ready"
    fi
fi
PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false exec "$python" "$here/gguf_export.py" "$(realpath "$1")" "${@:2}"
