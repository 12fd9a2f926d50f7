#!/usr/bin/env bash
# Loads what `ft export --to gguf` writes into llama.cpp, as the npm package node-llama-cpp ships it, and compares its
# probabilities with those of transformers, its tokens with those of tokenizers.
#
#   tests/peers/llama_cpp.sh target/release/ft [FAMILY ... | tokenizers]
#
# Installs node-llama-cpp under target/ (725 MB). PEERS_PYTHON names an interpreter with torch, transformers 5, PEFT, and for
# tokenizers mistral-common, sentencepiece and, for one of them, litellm. Exits with 1 if a line failed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 1 ] || { echo "usage: tests/peers/llama_cpp.sh FT [FAMILY ...]" >&2; exit 2; }
node=${PEERS_NODE:-$(cd "$here/../.." && pwd)/target/peers-node}
if [ ! -e "$node/node_modules/node-llama-cpp" ]; then
    echo "installing node-llama-cpp into $node" >&2
    mkdir -p "$node"
    (cd "$node" && npm i node-llama-cpp@3 --ignore-scripts --no-audit --no-fund >&2)
fi
HF_HUB_OFFLINE=1 exec "${PEERS_PYTHON:-python3}" "$here/llama_cpp.py" "$1" "$node" "${@:2}"
