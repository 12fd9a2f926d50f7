#!/usr/bin/env bash
# Renders the chat templates that packages of PyPI ship by Jinja2 and by ft, over conversations with tools, systems, empty and
# missing contents, and compares the texts. Needs Python with jinja2 and transformers.
#   tests/peers/templates.sh [FOLDER ...]     further folders with *.jinja
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for package in trl axolotl; do
  pip download --quiet --no-deps --dest "$work" "$package"
done
for wheel in "$work"/*.whl; do python -m zipfile -e "$wheel" "$work/$(basename "$wheel" .whl)"; done
python tests/peers/templates.py "$work" "$@" "$work/texts.jsonl"
FT_TEMPLATES="$work/texts.jsonl" cargo test --release -p ft-data --lib templates_of_packages -- --ignored --nocapture
