#!/usr/bin/env bash
# Asks `ft serve` with OpenAI's own Python client, and scores it with lm-evaluation-harness.
#
#   tests/peers/serve.sh target/release/ft
#
# Makes a virtual environment under target/ (large: it installs PyTorch), or uses the one whose interpreter PEERS_PYTHON names.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { echo "usage: tests/peers/serve.sh FT" >&2; exit 2; }
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$(cd "$here/../.." && pwd)/target/peers-openai-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing openai, lm-eval and PyTorch into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check \
            openai==3.54.0 "lm-eval[api]==0.4.13" torch==2.11.0 transformers==4.57.1 accelerate==1.15.0
        touch "$venv/.ready"
    fi
fi
export PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ft=$(realpath "$1")
"$python" "$here/serve.py" "$ft"
exec "$python" "$here/lm_eval_scores.py" "$ft"
