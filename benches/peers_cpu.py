#!/usr/bin/env python3
"""LoRA on the CPU: `ft` and PyTorch with PEFT in turn, on the same random model and the same number of tokens.

    python benches/peers_cpu.py target/release/ft [--shape q100m|q0.6b] [--tokens 512] [--rounds 3] [--dtype f32]

Needs torch, transformers and peft beside it (this Python's). Prints a line a run and, at the end, the ratio of the
medians: tokens a second, and the largest resident memory of each process.
"""
import argparse, json, os, resource, statistics, subprocess, sys, tempfile, time

SHAPES = {
    "q100m": dict(num_hidden_layers=12, hidden_size=768, intermediate_size=2304, num_attention_heads=12,
                  num_key_value_heads=4, head_dim=64, vocab_size=32000),
    "q0.6b": dict(num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                  num_key_value_heads=8, head_dim=128, vocab_size=151936),
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 5


def torch_steps(shape, tokens, dtype):
    """In a process of its own: seconds of each step after the first, and the peak of memory."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count())
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096, use_cache=False)
    kind = dict(f32=torch.float32, bf16=torch.bfloat16)[dtype]
    model = Qwen3ForCausalLM._from_config(config, dtype=kind, attn_implementation="sdpa")
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    seconds = []
    for _ in range(STEPS + 1):
        ids = torch.randint(0, config.vocab_size, (1, tokens))
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    print(json.dumps(dict(seconds=seconds[1:], peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)))


def ft_steps(ft, shape, tokens, dtype, recompute):
    with tempfile.TemporaryDirectory() as d:
        config = dict(SHAPES[shape], model_type="qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True,
                      max_position_embeddings=4096, hidden_act="silu")
        json.dump(config, open(f"{d}/config.json", "w"))
        with open(f"{d}/rows.jsonl", "w") as f:
            for r in range(STEPS + 1):
                ids = [(r * 7919 + i * 104729) % config["vocab_size"] for i in range(tokens)]
                f.write(json.dumps(dict(input_ids=ids)) + "\n")
        recipe = f"""
[model]
source = "{d}"
weights = "random"
dtype = "{dtype}"
[lora]
rank = 16
alpha = 32
[[train]]
modules = ["attention", "mlp"]
[data]
train = [{{ source = "{d}/rows.jsonl", format = "tokens" }}]
max_length = {tokens}
pack = false
[run]
steps = {STEPS + 1}
batch_rows = 1
device = "cpu"
output = "{d}/run"
[memory]
recompute = "{recompute}"
"""
        open(f"{d}/bench.toml", "w").write(recipe)
        subprocess.run([ft, "run", f"{d}/bench.toml"], check=True, capture_output=True)
        events = [json.loads(line) for line in open(f"{d}/run/metrics.jsonl")]
        steps = [e for e in events if e["event"] == "step"]
        return dict(seconds=[e["seconds"] for e in steps[1:]], peak=steps[-1]["peak_host_bytes"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("ft")
    p.add_argument("--shape", default="q100m", choices=SHAPES)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    p.add_argument("--recompute", default="none", help="ft's memory.recompute")
    a = p.parse_args()
    if a.ft == "torch":
        return torch_steps(a.shape, a.tokens, a.dtype)
    rates = {"ft": [], "torch": []}
    peaks = {"ft": 0, "torch": 0}
    for i in range(a.rounds):
        other = subprocess.run([sys.executable, __file__, "torch", "--shape", a.shape, "--tokens", str(a.tokens), "--dtype", a.dtype],
                               check=True, capture_output=True, text=True)
        for name, r in (("ft", ft_steps(a.ft, a.shape, a.tokens, a.dtype, a.recompute)), ("torch", json.loads(other.stdout))):
            rate = a.tokens / statistics.median(r["seconds"])
            rates[name].append(rate)
            peaks[name] = max(peaks[name], r["peak"])
            print(f"round {i + 1}  {name:<6} {rate:7.0f} tokens/s  peak {r['peak'] / 2**30:.2f} GiB", flush=True)
    ft, torch = (statistics.median(rates[k]) for k in ("ft", "torch"))
    print(f"{a.shape} {a.dtype} {a.tokens} tokens: ft {ft:.0f}, torch {torch:.0f} tokens/s, ratio {ft / torch:.2f}; "
          f"peak {peaks['ft'] / 2**30:.2f} and {peaks['torch'] / 2**30:.2f} GiB, ratio {peaks['ft'] / peaks['torch']:.2f}")


main()
