#!/usr/bin/env bash
# Runs `ft` with log.mlflow against MLflow's own server, and reads the runs by MLflow's client.
#
#   tests/peers/mlflow.sh target/release/ft
#
# Makes a virtual environment under target/, or uses the one whose interpreter PEERS_PYTHON names.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -eq 1 ] || { echo "usage: tests/peers/mlflow.sh FT" >&2; exit 2; }
ft=$(realpath "$1")
python=${PEERS_PYTHON:-}
if [ -z "$python" ]; then
    venv=$root/target/mlflow-venv
    python=$venv/bin/python
    if [ ! -e "$venv/.ready" ]; then
        echo "installing MLflow into $venv" >&2
        python3 -m venv "$venv"
        "$python" -m pip install -q --disable-pip-version-check mlflow==3.17.2
        touch "$venv/.ready"
    fi
fi
cd "$root"
PYTHONDONTWRITEBYTECODE=1 exec "$python" "$here/tracked.py" "$ft"
