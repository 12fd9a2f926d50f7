"""Plans against processes: 12 shapes of 1 GiB and more on the CPU, a few steps each, random weights.

    python benches/memory.py target/release/ft [--only NAME ..]

For each shape: what the plan said before the model was loaded, what the engine's allocations came to at their
fullest, and, with what the C library's allocator keeps, the largest resident size of the process less what it held
before loading. Needs 4 GiB of memory and Python's standard library.
"""
import argparse
import json
import os
import subprocess
import tempfile

GIB = 2**30


def dense(layers, width, inner, vocab, tied=False, heads=12):
    return dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=width, intermediate_size=inner,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 3, head_dim=64,
                vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=8192, rope_theta=1e6,
                rms_norm_eps=1e-6, hidden_act="silu")


def mixture(layers, width, inner, vocab, experts, top_k):
    return dict(dense(layers, width, inner, vocab), model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"],
                num_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=inner, norm_topk_prob=True)


ALL = '[[train]]\nmodules = ["attention", "mlp", "norms", "embedding", "head"]\nmethod = "full"\n'
LORA = '[[train]]\nmodules = ["attention", "mlp"]\n'
EXPERTS = '[[train]]\nmodules = ["attention", "experts"]\n'
TOP = '[[train]]\nmodules = ["experts", "router"]\nlayers = "-2:"\nmethod = "full"\n'
SMALL, LARGE = dense(12, 768, 2304, 16000), dense(16, 1152, 3456, 16000, heads=18)
MOE = mixture(8, 768, 512, 16000, 32, 4)

# name: config, rules, lengths of rows (repeated), overrides
SHAPES = {
    "full": (SMALL, ALL, [256], ["memory.recompute=none"]),
    "LoRA": (LARGE, LORA, [256], ["memory.recompute=none"]),
    "NF4, LoRA": (dense(16, 1152, 3456, 64000, heads=18), LORA, [256],
                  ["model.quantize=nf4", "memory.recompute=none", "run.micro_rows=2", "run.batch_rows=2"]),
    "mixture, LoRA": (MOE, EXPERTS, [256], ["memory.recompute=none"]),
    "mixture, NF4": (mixture(6, 1152, 640, 64000, 64, 4), EXPERTS, [256],
                     ["model.quantize=nf4", "memory.recompute=3", "run.micro_rows=2", "run.batch_rows=2"]),
    "LoRA, recompute, micro 4": (LARGE, LORA, [256], ["memory.recompute=all", "run.micro_rows=4", "run.batch_rows=4"]),
    "full, recompute, micro 2": (SMALL, ALL, [256], ["memory.recompute=all", "run.micro_rows=2", "run.batch_rows=2"]),
    "full, bf16": (SMALL, ALL, [64], ["memory.recompute=none", "model.dtype=bf16"]),
    "LoRA, packed, partial": (LARGE, LORA, [40, 90, 133, 100, 61], ["memory.recompute=8"]),
    "DoRA, dropout, ragged": (LARGE, LORA, [200, 110, 256, 31], ["lora.dora=true", "lora.dropout=0.1", "data.pack=false",
                              "run.micro_rows=2", "run.batch_rows=2", "memory.recompute=none"]),
    "mixture, full on top": (MOE, TOP, [256], ["memory.recompute=all"]),
    "full, tied, vocabulary": (dense(6, 768, 2304, 64000, tied=True), ALL, [256], ["memory.recompute=3"]),
}

RECIPE = """
[model]
source = "model"
weights = "random"
{rules}
[data]
train = [{{ source = "rows.jsonl", format = "tokens" }}]
max_length = 512
shuffle = false
[run]
steps = 2
batch_rows = 1
device = "cpu"
output = "out"
"""


def run(ft, config, rules, lengths, overrides):
    with tempfile.TemporaryDirectory() as d:
        os.mkdir(f"{d}/model")
        with open(f"{d}/model/config.json", "w") as f:
            json.dump(config, f)
        with open(f"{d}/rows.jsonl", "w") as f:
            for r in range(40):
                n = lengths[r % len(lengths)]
                ids = [(r * 7919 + i * 104729) % config["vocab_size"] for i in range(n)]
                f.write(json.dumps(dict(input_ids=ids)) + "\n")
        with open(f"{d}/r.toml", "w") as f:
            f.write(RECIPE.format(rules=rules))
        env = dict(os.environ, FT_CACHE=f"{d}/cache")
        done = subprocess.run([os.path.abspath(ft), "run", "r.toml", *overrides], cwd=d, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{overrides}: {done.stderr}")
        with open(f"{d}/out/metrics.jsonl") as f:
            events = [json.loads(line) for line in f]
        start, end = (next(e for e in events if e["event"] == k) for k in ("start", "end"))
        before = start["plan"]["host_bytes_before_loading"]
        memory = end["memory"]
        assert memory["process_bytes"] <= end["peak_host_bytes"] - before + 2**20
        return (end["planned_peak_bytes"], end["peak_device_bytes"], memory["planned_process_bytes"],
                memory["process_bytes"], memory, start["plan"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("ft")
    p.add_argument("--only", nargs="*", default=list(SHAPES))
    p.add_argument("--details", action="store_true", help="by component and phase")
    a = p.parse_args()
    print("| shape | planned | allocated | apart | planned process | process | apart |\n|---|---|---|---|---|---|---|", flush=True)
    worst = [0, 0]
    for name in a.only:
        planned, counted, ours, process, memory, plan = run(a.ft, *SHAPES[name])
        apart = [counted / planned - 1, process / ours - 1]
        worst = [max(w, abs(x)) for w, x in zip(worst, apart)]
        small = " (below 1 GiB)" if planned < GIB else ""
        print(f"| {name}{small} | {planned / GIB:.3f} GiB | {counted / GIB:.3f} GiB | {100 * apart[0]:+.2f}% | "
              f"{ours / GIB:.3f} GiB | {process / GIB:.3f} GiB | {100 * apart[1]:+.2f}% |", flush=True)
        if a.details:
            print(json.dumps(plan), "\n", json.dumps(memory), flush=True)
    print(f"\nallocated within {100 * worst[0]:.2f}% of the plan, processes within {100 * worst[1]:.2f}%")


main()
