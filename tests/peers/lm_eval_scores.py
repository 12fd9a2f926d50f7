"""Scores the quickstart's model with lm-evaluation-harness: by `ft serve` (local-completions), and by its own backend (hf).

    tests/peers/serve.sh FT
"""
import json, os, signal, subprocess, sys, tempfile

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "data/model")

# f32 logits of two programs; a perplexity is an exponential of a mean of them.
TOLERANCE = 1e-4

CHOICE = """
task: ft_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""

ROLLING = """
task: ft_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""

THINGS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "sun": "yellow"}


def tasks(folder):
    """Questions with choices of different lengths, and texts."""
    colors = sorted(THINGS.values())
    with open(f"{folder}/choice.jsonl", "w") as f:
        for i in range(40):
            thing, color = list(THINGS.items())[i % len(THINGS)]
            choices = [colors[(i + k * (1 + i // 6)) % len(colors)] for k in range(3)]
            choices = [c for c in dict.fromkeys(choices) if c != color] + [color]
            label = i % len(choices)
            choices[label], choices[-1] = choices[-1], choices[label]
            form = ["What colour is the {}?", "The {} is", "Tell me about the {}.\nIt is"][i % 3]
            print(json.dumps({"question": form.format(thing), "choices": [f"{c} é 日本" if i % 5 == 0 else c for c in choices], "label": label}), file=f)
    with open(f"{folder}/rolling.jsonl", "w") as f:
        for i, (thing, color) in enumerate(THINGS.items()):
            print(json.dumps({"text": f"The {thing} is {color}. " * (3 + 4 * i) + "Ünïcödé 🙂 ends."}), file=f)
    for name, text in ("choice", CHOICE), ("rolling", ROLLING):
        with open(f"{folder}/{name}.yaml", "w") as f:
            f.write(text.format(folder=folder))


def scores(folder, model, arguments, batch):
    manager = TaskManager(include_path=folder, include_defaults=False)
    results = simple_evaluate(
        model=model, model_args=arguments, tasks=["ft_choice", "ft_rolling"], task_manager=manager,
        batch_size=batch, device="cpu", bootstrap_iters=0, log_samples=True,
    )
    numbers = {f"{task} {k}": v for task, r in results["results"].items() for k, v in r.items() if isinstance(v, float)}
    samples = {task: [s["filtered_resps"] for s in rows] for task, rows in results["samples"].items()}
    return numbers, samples


def flat(value):
    if isinstance(value, (list, tuple)):
        return [x for v in value for x in flat(v)]
    return [value]


def main():
    failures = count = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        tasks(folder)
        server = subprocess.Popen([sys.argv[1], "serve", MODEL, "--port", "0", "--name", "m"], stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().strip() + "/completions"
            common = {"max_length": 512}
            of_server = {"model": "m", "base_url": url, "tokenizer": MODEL, "num_concurrent": 1, "max_retries": 1, **common}
            ours, our_samples = scores(folder, "local-completions", of_server, 4)
            server.send_signal(signal.SIGTERM)
            ended = server.wait(30)
        finally:
            server.kill()
        theirs, their_samples = scores(folder, "hf", {"pretrained": MODEL, "dtype": "float32", **common}, 1)
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        good = a is not None and b is not None and abs(a - b) <= TOLERANCE * abs(b)
        failures, count = failures + (not good), count + 1
        print(f"{name:<44}{a} {b} {'ok' if good else 'FAILED'}", flush=True)
    for task in our_samples:
        a, b = flat(our_samples[task]), flat(their_samples[task])
        good = len(a) == len(b) > 0 and all(abs(float(x) - float(y)) <= TOLERANCE * max(abs(float(y)), 1) for x, y in zip(a, b))
        failures, count = failures + (not good), count + 1
        print(f"{task + ' each answer':<44}{len(a)} numbers {'ok' if good else 'FAILED'}", flush=True)
    failures, count = failures + (ended != 143), count + 1
    print(f"{'SIGTERM':<44}{ended}")
    print(f"{count - failures} of {count} passed")
    return 1 if failures or count < 6 else 0


sys.exit(main())
