"""Asks `ft serve` on the quickstart's model with OpenAI's Python client: models, chat, streams, completions, errors.

    tests/peers/serve.sh FT
"""
import os, signal, subprocess, sys

import openai

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "data/model")
ASK = [{"role": "user", "content": "What colour is the sky?"}]


def main():
    server = subprocess.Popen([sys.argv[1], "serve", MODEL, "--port", "0", "--api-key", "k"], stdout=subprocess.PIPE, text=True)
    failures = count = 0

    def line(what, good):
        nonlocal failures, count
        failures, count = failures + (not good), count + 1
        print(f"{what:<44}{'ok' if good else 'FAILED'}", flush=True)

    def raises(kind, call):
        try:
            call()
        except kind as e:
            return f"{e} ({e.code})"
        return ""

    try:
        url = server.stdout.readline().strip()
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        chat = lambda **more: client.chat.completions.create(**{"model": MODEL, "messages": ASK, "temperature": 0, **more})
        line("models", [m.id for m in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL)
        whole = chat()
        text = whole.choices[0].message.content
        line(f"chat: {text!r}", "blue" in text and whole.choices[0].finish_reason == "stop")
        line("usage", whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens > 0)
        parts = list(chat(stream=True, stream_options={"include_usage": True}))
        said = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        line("stream", said == text and parts[-1].usage == whole.usage and len(parts) > 3)
        line("max_tokens", chat(max_tokens=2).choices[0].finish_reason == "length")
        line("stop", chat(stop=[" "]).choices[0].message.content == text.split(" ")[0])
        draw = lambda: client.completions.create(model=MODEL, prompt="The sky", max_tokens=8, temperature=1.2, top_p=0.9, seed=3).choices[0].text
        line("completions, one seed", draw() == draw() != "")
        parts = list(client.completions.create(model=MODEL, prompt="The sky", max_tokens=8, temperature=0, stream=True))
        line("completions, stream", len("".join(p.choices[0].text for p in parts)) > 0 and parts[-1].choices[0].finish_reason)
        line("another model", "does not exist" in raises(openai.NotFoundError, lambda: chat(model="gpt-4")))
        line("n = 2", "n: 2" in raises(openai.BadRequestError, lambda: chat(n=2)))
        scored = client.completions.create(model=MODEL, prompt=["The sky is", "a"], max_tokens=0, echo=True, logprobs=2)
        lists = [c.logprobs for c in scored.choices]
        line("echo, a list of prompts", [c.text for c in scored.choices] == ["The sky is", "a"])
        line("completions, logprobs", all(len(l.tokens) == len(l.token_logprobs) == len(l.text_offset) and l.token_logprobs[0] is None for l in lists))
        content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        line("chat, logprobs", all(len(t.top_logprobs) == 2 and t.logprob == t.top_logprobs[0].logprob <= 0 for t in content))
        line("top_k", chat(temperature=2, extra_body={"top_k": 1}).choices[0].message.content == text)
        line("an unknown variable", "reads no" in raises(openai.BadRequestError, lambda: chat(extra_body={"chat_template_kwargs": {"a": 1}})))
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        line("tools", "tools" in raises(openai.BadRequestError, lambda: chat(tools=[tool])))
        line("JSON", "response_format" in raises(openai.BadRequestError, lambda: chat(response_format={"type": "json_object"})))
        wrong = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
        line("a wrong key", "invalid_api_key" in raises(openai.AuthenticationError, lambda: wrong.models.list()))
        server.send_signal(signal.SIGINT)
        line("ctrl-c", server.wait(30) == 130)
    finally:
        server.kill()
    print(f"{count - failures} of {count} passed")
    return 1 if failures or not count else 0


sys.exit(main())
