#!/usr/bin/env python3
"""The predicted order of layouts against the measured one, on CPU threads:

    python benches/layouts.py target/release/ft [--tasks 10] [--ranks 2,4] [--rounds 4] [--seed 1] [--all]

Measures the rates of this machine first (ft bench, ft bench --ranks). Each task is a random small model with random rows, and
its layouts are the first five that `ft plan --devices` prints; with --all, all of them. In each round all layouts run, in an order
of its own; a layout's time is the fastest step of all rounds. Others may use the machine too, thus the measurement has a spread:
the fastest step of even rounds against that of odd ones, of the layout where they differ most. Two layouts whose times
differ by less than the spread, or by less than 1%, as the plan's own order takes it, are a tie. A task is right if
no two layouts that are no tie are predicted in the other order. A task with a spread above 10% shows nothing, right or wrong, and
counts as unclear. Needs Python alone."""

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
    length = rng.choice([128, 256])
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
steps = 4
batch_rows = 8
micro_rows = 2
save_every = 0
"""


def write_task(folder, rng):
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
    method = text.split('method = "')[1].split('"')[0]
    return f"{method}, {config['num_hidden_layers']} layers of {config['hidden_size']}, rows of {length}"


def run_task(ft, rng, args, ranks):
    """Words of a task, its layouts as (settings, predicted, measured), the spread, and the fastest step by layout and half."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_CACHE_HOME": folder}

        def run(*words, **more):
            q = subprocess.run([ft, *words], cwd=folder, env=env | more, capture_output=True, text=True, check=False)
            if q.returncode:
                raise SystemExit(f"{words}: exit {q.returncode}: {q.stderr[-800:]}")
            return q.stdout

        words = write_task(folder, rng)
        # with the threads of a rank
        run("bench", "r.toml", "--steps", "3", RAYON_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // ranks)))
        run("bench", "--ranks", str(ranks))
        plan = json.loads(run("plan", "r.toml", "--devices", str(ranks), "--json"))
        layouts = [(l["set"], l["step_seconds"]) for l in plan["layouts"]][: None if args.all else 5]
        halves = {settings: [float("inf")] * 2 for settings, _ in layouts}
        for turn in range(args.rounds):
            for settings, _ in rng.sample(layouts, len(layouts)):
                run("run", "r.toml", "--overwrite", "run.output=o", "log.samples=[]", *settings.split())
                with open(f"{folder}/o/metrics.jsonl", encoding="utf8") as f:
                    steps = [e for e in map(json.loads, f) if e.get("event") == "step"]
                fastest = min(e["seconds"] for e in steps[1:])
                halves[settings][turn % 2] = min(halves[settings][turn % 2], fastest)
        spread = max(max(both) / min(both) - 1 for both in halves.values())
        return words, [(s, predicted, min(halves[s])) for s, predicted in layouts], max(spread, 0.01)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("ft")
    args.add_argument("--tasks", type=int, default=10)
    args.add_argument("--ranks", default="2,4")
    args.add_argument("--rounds", type=int, default=4)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--all", action="store_true")
    args = args.parse_args()
    ft, verdicts, pairs, decided = os.path.abspath(args.ft), [], 0, 0
    counts = [int(n) for n in args.ranks.split(",")]
    for task in range(args.tasks):
        # a task by itself: the same for any number of others
        ranks, rng = counts[task % len(counts)], random.Random(1000 * args.seed + task)
        words, layouts, spread = run_task(ft, rng, args, ranks)
        times = [measured for _, _, measured in layouts]
        both = [(i, j) for i in range(len(times)) for j in range(i + 1, len(times))]
        differ = [(i, j) for i, j in both if max(times[i], times[j]) > (1 + spread) * min(times[i], times[j])]
        wrong = [(i, j) for i, j in differ if times[i] > times[j]]
        verdicts.append("unclear" if spread > 0.1 else "wrong" if wrong else "right")
        pairs, decided = pairs + len(both), decided + len(differ)
        print(f"task {task}: {verdicts[-1]}; {len(wrong)} of {len(differ)} pairs in the other order, "
              f"{len(both) - len(differ)} tied by a spread of {spread:.1%}")
        print(f"  {ranks} ranks; {words}")
        for settings, predicted, measured in layouts:
            print(f"  {settings:<55} {predicted:8.3f} s predicted {measured:8.3f} s measured", flush=True)
    count = verdicts.count
    print(f"{count('right')} tasks in the predicted order, {count('wrong')} not, {count('unclear')} unclear; "
          f"{decided} of {pairs} pairs differ by more than the spread")


if __name__ == "__main__":
    main()
