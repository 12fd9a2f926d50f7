"""Compares memory plans with real runs on the CPU: 32 shapes, 12 of 1 GiB and more, two steps each, random weights.

    python benches/memory.py target/release/ft [--only NAME ..] [--budgets]

Prints for each shape: planned bytes, peak of the engine's allocations, and growth of the process's resident size over
the size before loading (engine plus allocator overhead). The plan of a mixture assumes tokens spread evenly over the
experts, plus a separate reserve for uneven routing: "routing" is the used part of the reserve, "apart" the deviation
beyond plan and reserve. Idle experts take less than planned. In shapes with rows of a single repeated token, all tokens
choose the same experts. --budgets runs the smaller shapes again with less memory and checks the process against the
budget. Needs 4 GiB of memory and Python's standard library.
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

# name: (config, rules, row lengths in tokens (repeated), overrides)
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

ATTENTION = '[[train]]\nmodules = ["attention"]\n'
ROUTERS = '[[train]]\nmodules = ["router"]\nmethod = "full"\n'
SOME = '[[train]]\nmodules = ["experts"]\nexperts = [0, 1]\nmethod = "full"\n'
EVERYTHING = ALL.replace('"mlp"', '"experts", "router"')
MIDDLE, TINY = dense(8, 512, 1536, 8000, heads=9), dense(2, 64, 192, 512, heads=3)
QWEN2 = dict(MIDDLE, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
LLAMA = dict(MIDDLE, model_type="llama", architectures=["LlamaForCausalLM"])
MIXTRAL = dict(dense(6, 512, 1024, 8000, heads=9), model_type="mixtral", architectures=["MixtralForCausalLM"],
               num_local_experts=8, num_experts_per_tok=2)
FINE = mixture(4, 512, 256, 8000, 32, 4)
NONE, EACH, NF4 = "memory.recompute=none", "memory.recompute=all", "model.quantize=nf4"
ONE = [-512]  # one token, over and over


def rows(n):
    return [f"run.micro_rows={n}", f"run.batch_rows={n}"]


# hard cases for the plan: many and long rows, small models, uneven routing
SHAPES |= {
    "many rows a step": (TINY, LORA, [512], ["run.batch_rows=1024"]),
    "many rows a step, shuffled": (TINY, ALL, [300, 512, 40], ["run.batch_rows=600", "data.shuffle=true", "run.micro_rows=2"]),
    "Mixtral routers, 2048 tokens": (MIXTRAL, ROUTERS, [512], [NONE, *rows(4)]),
    "Mixtral routers, recompute": (MIXTRAL, ROUTERS, [2048], [EACH, "data.max_length=2048"]),
    "LoRA, 4096 tokens, recompute": (MIDDLE, LORA, [4096], [EACH, "data.max_length=4096"]),
    "LoRA, 4096 tokens": (MIDDLE, LORA, [4096], [NONE, "data.max_length=4096"]),
    "Qwen2, full, 2 of 8 recomputed": (QWEN2, ALL, [512], ["memory.recompute=2", *rows(2)]),
    "Llama, LoRA, rank 64": (LLAMA, LORA, [512], [NONE, "lora.rank=64", *rows(4)]),
    "attention, top 2 layers": (MIDDLE, ATTENTION + 'layers = "-2:"\n', [512], [NONE, *rows(4)]),
    "DoRA, recompute": (MIDDLE, LORA, [512], [EACH, "lora.dora=true", *rows(4)]),
    "dropout, 8 ragged rows": (MIDDLE, LORA, [500, 20, 300, 411], [NONE, "lora.dropout=0.1", "data.pack=false", *rows(8)]),
    "NF4, bf16": (MIDDLE, LORA, [512], [NF4, "model.dtype=bf16", NONE, *rows(2)]),
    "NF4, dequantized per layer": (MIDDLE, LORA, [512], [NF4, EACH, "memory.dequantize=per_layer", *rows(4)]),
    "experts in full, NF4 beside": (FINE, SOME, [512], [NF4, NONE, *rows(2)]),
    "experts, DoRA and dropout": (FINE, EXPERTS, [512], [NONE, "lora.dora=true", "lora.dropout=0.1", *rows(2)]),
    "mixture in full, bf16": (FINE, EVERYTHING, [512], ["model.dtype=bf16", EACH]),
    "one token, LoRA on experts": (FINE, EXPERTS, ONE, [NONE, *rows(4)]),
    "one token, experts in full": (MIXTRAL, EVERYTHING, ONE, [EACH, *rows(4)]),
    "one token, NF4": (FINE, EXPERTS, ONE, [NF4, EACH, *rows(4)]),
    "small": (dense(4, 128, 384, 2000, heads=3), ALL, [200, 64], [NONE]),
}
LARGE_SHAPES = list(SHAPES)[:12]

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
                step = 104729 if n > 0 else 0
                ids = [((r * 7919 if n > 0 else 7) + i * step) % config["vocab_size"] for i in range(abs(n))]
                f.write(json.dumps(dict(input_ids=ids)) + "\n")
        with open(f"{d}/r.toml", "w") as f:
            f.write(RECIPE.format(rules=rules))
        env = dict(os.environ, FT_CACHE=f"{d}/cache")
        done = subprocess.run([os.path.abspath(ft), "run", "r.toml", *overrides], cwd=d, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{overrides}: {done.returncode}: {done.stderr}")
        with open(f"{d}/out/metrics.jsonl") as f:
            events = [json.loads(line) for line in f]
        start, end = (next(e for e in events if e["event"] == k) for k in ("start", "end"))
        before = start["plan"]["host_bytes_before_loading"]
        memory = end["memory"]
        assert memory["process_bytes"] <= end["peak_host_bytes"] - before + 2**20
        return (end["planned_peak_bytes"], end["peak_device_bytes"], memory["planned_process_bytes"],
                memory["process_bytes"], memory, start["plan"])


def budgets(ft, names):
    """Runs shapes under budgets below their free choice, and compares the process size with the budget."""
    print("| shape | budget | choices | process | of the budget |\n|---|---|---|---|---|", flush=True)
    worst = 0
    for name in names:
        config, rules, lengths, overrides = SHAPES[name]
        free = [o for o in overrides if not o.startswith("memory.")]
        most = run(ft, config, rules, lengths, free + ["memory.budget=1TiB"])[5]["peak_device_bytes"]
        least = run(ft, config, rules, lengths, free + ["memory.recompute=all"])[5]["peak_device_bytes"]
        for share in (1, 0.6, 0.3, 0.05):
            budget = int(least + share * (most - least)) + 2**16
            result = run(ft, config, rules, lengths, free + [f"memory.budget={budget}"])
            process, plan = result[3], result[5]
            worst = max(worst, process / budget)
            chosen = ", ".join(f"{k} {v['value']}" for k, v in plan["choices"].items() if k in ("recompute", "head_rows"))
            print(f"| {name} | {budget / 2**20:.1f} MiB | {chosen} | {process / 2**20:.1f} MiB | {100 * process / budget:.1f}% |",
                  flush=True)
    print(f"\nat the most {100 * worst:.1f}% of the budget")


def beside(taken, planned, reserve):
    """Deviation of `taken` from the range [planned, planned + reserve], as a share of the plan."""
    return (taken - min(max(taken, planned), planned + reserve)) / planned


def main():
    p = argparse.ArgumentParser()
    p.add_argument("ft")
    p.add_argument("--only", nargs="*", default=list(SHAPES))
    p.add_argument("--details", action="store_true", help="by component and phase")
    p.add_argument("--budgets", action="store_true", help="the smaller shapes under budgets")
    a = p.parse_args()
    if a.budgets:
        return budgets(a.ft, [n for n in a.only if n not in LARGE_SHAPES])
    print("| shape | planned | allocated | apart | planned process | process | apart | routing |\n|---|---|---|---|---|---|---|---|",
          flush=True)
    worst, over = {False: [0, 0], True: [0, 0]}, 0
    for name in a.only:
        planned, counted, ours, process, memory, plan = run(a.ft, *SHAPES[name])
        reserve = plan["device"].get("routing_reserve", 0)
        mixture = "experts" in json.dumps(SHAPES[name][0])
        # with a reserve, anything between plan and plan + reserve is a match
        apart = [beside(counted, planned, reserve), beside(process, ours, reserve)]
        worst[mixture] = [max(w, abs(x)) for w, x in zip(worst[mixture], apart)]
        over = max(over, counted / (planned + reserve) - 1)
        told = f"{100 * (counted / planned - 1):+.2f}% of up to {100 * reserve / planned:+.2f}%" if reserve else ""
        print(f"| {name} | {planned / GIB:.3f} GiB | {counted / GIB:.3f} GiB | {100 * apart[0]:+.2f}% | "
              f"{ours / GIB:.3f} GiB | {process / GIB:.3f} GiB | {100 * apart[1]:+.2f}% | {told} |", flush=True)
        if a.details:
            print(json.dumps(plan), "\n", json.dumps(memory), flush=True)
    for what, (engine, process) in (("dense models", worst[False]), ("mixtures", worst[True])):
        print(f"\n{what}: allocated within {100 * engine:.2f}% of the plan, processes within {100 * process:.2f}%")
    print(f"mixtures: {100 * over:.2f}% over the plan with its routing reserve at the most")

main()
