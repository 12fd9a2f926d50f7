#!/usr/bin/env python3
"""Holds chat templates that Python packages ship to Jinja2: each conversation's text, or that both raise an error.

    python tests/peers/templates.py FOLDER ... OUT.jsonl     (writes Jinja2's texts of all *.jinja below the folders)

Then tests/peers/templates.sh lets ft render the same and compares. Versions: tests/fixtures/jinja/make.py.
"""
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import _cached_compile_jinja_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city, in \"°C\" & <percent>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city's name", "enum": ["Oslo", "Zürich"]},
                    "days": {"type": ["integer", "null"], "default": 1e-05, "minimum": 0},
                    "where": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2, "p": 1e16}}}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = {
    "one": [turn("user", "Hi")],
    "answered": [turn("user", "Hi"), turn("assistant", "Hello, it's me")],
    "system": [turn("system", "Be <brief>."), turn("user", "Hi\n"), turn("assistant", " Hello ")],
    "several": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d"), turn("user", "e")],
    "empty": [turn("user", ""), turn("assistant", ""), turn("user", "x"), turn("assistant", "y")],
    "none": [turn("user", "x"), turn("assistant", None, tool_calls=[CALL])],
    "call": [turn("user", "x"), turn("assistant", "", tool_calls=[CALL]), turn("tool", "[1.5, null]", tool_call_id="call00001", name="get_weather"), turn("assistant", "Warm")],
    "reasoning": [turn("user", "x"), turn("assistant", "<think>\nhm\n</think>\n\nyes"), turn("user", "y"), turn("assistant", "no", reasoning_content="why")],
    "parts": [turn("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), turn("assistant", "three")],
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def main():
    *folders, out = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as file:
        for path in sorted({p for f in folders for p in pathlib.Path(f).rglob("*.jinja*")}):
            source = path.read_text(encoding="utf-8")
            if "strftime_now" in source:
                source = source.replace("strftime_now", "day_of")  # a fixed day in both
            for name, messages in CONVERSATIONS.items():
                for tools in (None, TOOLS):
                    for prompt in (False, True):
                        context = dict(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **VARIABLES)
                        try:
                            text = _cached_compile_jinja_template(source).render(**json.loads(json.dumps(context)))
                        except Exception:
                            text = None
                        row = [f"{path.name} {name}", source, messages, tools, prompt, VARIABLES, text]
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")


main()
