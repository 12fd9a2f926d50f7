#!/usr/bin/env python3
"""The predicted order of layouts against the measured one, on CPU threads:

    python benches/layouts.py target/release/ft [--tasks 10] [--ranks 2] [--seed 1]

Measures the rates of this machine first (ft bench, ft bench --ranks). Each task is a random small model with random rows, and
its layouts are those that `ft plan --devices` prints. All layouts run in turn, twice; a layout's time is its fastest step.
A task is right if no two layouts whose measured times differ by more than 10% are predicted in the other order.
Needs Python alone."""

import argparse
import json
import os
import random
import subprocess
import tempfile


def model(rng):
    heads = rng.choice([4, 8])
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": heads * 32,
        "intermediate_size": rng.choice([512, 1024]), "num_hidden_layers": rng.choice([4, 6]),
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 32,
        "vocab_size": rng.choice([1000, 4000]), "max_position_embeddings": 4096, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    }


def recipe(rng):
    method = rng.choice(["lora", "full"])
    length = rng.choice([256, 512])
    return length, f"""[model]
source = "model"
weights = "random"
[[train]]
modules = ["attention", "mlp"]
method = "{method}"
[data]
max_length = {length}
[[data.train]]
source = "rows.jsonl"
format = "tokens"
[run]
device = "cpu"
steps = 5
batch_rows = 8
micro_rows = 2
save_every = 0
"""


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("ft")
    args.add_argument("--tasks", type=int, default=10)
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--seed", type=int, default=1)
    args = args.parse_args()
    ft, rng, right = os.path.abspath(args.ft), random.Random(args.seed), 0
    for task in range(args.tasks):
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "XDG_CACHE_HOME": folder}

            def run(*words):
                q = subprocess.run([ft, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
                if q.returncode:
                    raise SystemExit(f"{words}: exit {q.returncode}: {q.stderr[-800:]}")
                return q.stdout

            os.mkdir(f"{folder}/model")
            config, (length, text) = model(rng), recipe(rng)
            with open(f"{folder}/model/config.json", "w", encoding="utf8") as f:
                json.dump(config, f)
            with open(f"{folder}/rows.jsonl", "w", encoding="utf8") as f:
                for row in range(64):
                    ids = [(i * 7919 + row * 104729) % config["vocab_size"] for i in range(length)]
                    f.write(json.dumps({"input_ids": ids}) + "\n")
            with open(f"{folder}/r.toml", "w", encoding="utf8") as f:
                f.write(text)
            run("bench", "r.toml", "--steps", "2")
            run("bench", "--ranks", str(args.ranks))
            plan = json.loads(run("plan", "r.toml", "--devices", str(args.ranks), "--json"))
            layouts = [(l["set"], l["step_seconds"]) for l in plan["layouts"]]
            best = {}
            for _ in range(2):
                for settings, _ in layouts:
                    run("run", "r.toml", "--overwrite", "run.output=o", "log.samples=[]", *settings.split())
                    with open(f"{folder}/o/metrics.jsonl", encoding="utf8") as f:
                        steps = [e for e in map(json.loads, f) if e.get("event") == "step"]
                    seconds = min(e["seconds"] for e in steps[1:])
                    best[settings] = min(seconds, best.get(settings, seconds))
            times = [best[settings] for settings, _ in layouts]
            wrong = [(i, j) for i in range(len(times)) for j in range(i + 1, len(times)) if times[i] > 1.1 * times[j]]
            right += not wrong
            print(f"task {task}: {'right' if not wrong else 'wrong'}, {text.split('method = ')[1].split()[0]}, rows of {length}")
            for settings, predicted in layouts:
                print(f"  {settings:<55} {predicted:8.3f} s predicted {best[settings]:8.3f} s measured")
    print(f"{right} of {args.tasks} tasks in the predicted order")


if __name__ == "__main__":
    main()
