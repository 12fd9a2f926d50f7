#!/usr/bin/env python3
"""Compares training steps of `ft` and of PyTorch with PEFT: alternating runs, same random model, same number of tokens.

    python benches/peers.py target/release/ft [--shape q100m] [--layers N] [--tokens 512] [--rounds 3] [--dtype f32]
                            [--base plain|nf4] [--train lora|full] [--recompute none|all] [--device cpu|cuda]
                            [--liger] [--threads 1 2 ..]

Needs torch, transformers and peft in this Python, bitsandbytes for `--base nf4`, liger-kernel for `--liger`. `--recompute` applies to both.
Prints a line per run. Then, per thread count, prints the ratios of median tokens per second and of peak memory (process on
the CPU, device on CUDA), as text and as a line of JSON. Supports the dense shapes of benches/shapes.py.
"""
import argparse, json, os, resource, statistics, subprocess, sys, tempfile, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import shapes

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 5


def in_4_bits(model, dtype, device):
    """Replaces the linears of the layers by bitsandbytes 4-bit ones."""
    import bitsandbytes as bnb
    import torch

    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, torch.nn.Linear) and name in LINEARS:
                new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None,
                                        compute_dtype=dtype, quant_type="nf4")
                new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                new.bias = linear.bias
                setattr(parent, name, new.to(device))
    model.is_loaded_in_4bit = True


def torch_steps(a):
    """Runs the PyTorch side in this process: seconds of each step after the first, and peak memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if a.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        _apply_liger_kernel("llama" if a.shape.startswith("llama") else "qwen3")
    torch.manual_seed(0)
    torch.set_num_threads(a.threads[0])
    dtype = dict(f32=torch.float32, bf16=torch.bfloat16)[a.dtype]
    with tempfile.TemporaryDirectory() as d:
        shapes.write(d, a.shape, a.layers)
        config = AutoConfig.from_pretrained(d, use_cache=False)
    with torch.device(a.device):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, attn_implementation="sdpa")
    if a.base == "nf4":
        in_4_bits(model, dtype, a.device)
    if a.train == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS))
    if a.recompute == "all":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    wait = torch.cuda.synchronize if a.device == "cuda" else lambda: None
    seconds = []
    for _ in range(STEPS + 1):
        ids = torch.randint(0, config.vocab_size, (1, a.tokens), device=a.device)
        wait()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        seconds.append(time.perf_counter() - start)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(dict(seconds=seconds[1:], peak=torch.cuda.max_memory_allocated() if a.device == "cuda" else host)))


def ft_steps(ft, a):
    with tempfile.TemporaryDirectory() as d:
        shapes.write(d, a.shape, a.layers)
        with open(f"{d}/rows.jsonl", "w") as f:
            for r in range(STEPS + 1):
                ids = [(r * 7919 + i * 104729) % shapes.SHAPES[a.shape]["vocab_size"] for i in range(a.tokens)]
                f.write(json.dumps(dict(input_ids=ids)) + "\n")
        trains = '[lora]\nrank = 16\nalpha = 32\n[[train]]\nmodules = ["attention", "mlp"]' if a.train == "lora" else \
            '[[train]]\nmodules = ["/.*/"]\nmethod = "full"'
        recipe = f"""
[model]
source = "{d}"
weights = "random"
dtype = "{a.dtype}"
{'quantize = "nf4"' if a.base == "nf4" else ''}
{trains}
[data]
train = [{{ source = "{d}/rows.jsonl", format = "tokens" }}]
max_length = {a.tokens}
pack = false
[run]
steps = {STEPS + 1}
batch_rows = 1
device = "{a.device}"
output = "{d}/run"
[memory]
recompute = "{a.recompute}"
"""
        with open(f"{d}/bench.toml", "w") as f:
            f.write(recipe)
        threads = dict(os.environ, RAYON_NUM_THREADS=str(a.threads[0]))
        subprocess.run([ft, "run", f"{d}/bench.toml"], check=True, stdout=subprocess.DEVNULL, env=threads)
        with open(f"{d}/run/metrics.jsonl") as f:
            events = [json.loads(line) for line in f]
        steps = [e for e in events if e["event"] == "step"]
        peak = "peak_host_bytes" if a.device == "cpu" else "peak_device_bytes"
        return dict(seconds=[e["seconds"] for e in steps[1:]], peak=steps[-1][peak], products=events[0].get("products"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ft")
    p.add_argument("--shape", default="q100m", choices=[s for s in shapes.SHAPES if not shapes.is_moe(s)])
    p.add_argument("--layers", type=int, help="fewer layers than the shape has")
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    p.add_argument("--base", default="plain", choices=["plain", "nf4"])
    p.add_argument("--train", default="lora", choices=["lora", "full"])
    p.add_argument("--recompute", default="none", choices=["none", "all"])
    p.add_argument("--liger", action="store_true", help="PyTorch with the kernels of liger-kernel")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count()], help="compare with each of these")
    a = p.parse_args()
    if a.ft == "torch":
        return torch_steps(a)
    for threads in a.threads:
        compare(argparse.Namespace(**dict(vars(a), threads=[threads])))


def compare(a):
    rates = {"ft": [], "torch": []}
    peaks = {"ft": 0, "torch": 0}
    how = "widened"
    for i in range(a.rounds):
        # the last --threads wins
        same = ["torch", *sys.argv[2:], "--threads", str(a.threads[0])]
        other = subprocess.run([sys.executable, __file__, *same], check=True, stdout=subprocess.PIPE, text=True)
        for name, r in (("ft", ft_steps(a.ft, a)), ("torch", json.loads(other.stdout.splitlines()[-1]))):
            rate = a.tokens / statistics.median(r["seconds"])
            rates[name].append(rate)
            how = r.get("products") or how
            peaks[name] = max(peaks[name], r["peak"])
            print(f"round {i + 1}  {name:<6} {rate:7.0f} tokens/s  peak {r['peak'] / 2**30:.2f} GiB", flush=True)
    ft, torch = (statistics.median(rates[k]) for k in ("ft", "torch"))
    what = f"{a.shape} {a.train} {a.base} {a.dtype} {a.tokens} tokens on {a.device}, recompute {a.recompute}, {a.threads[0]} threads"
    what += f", products: {how}" if a.dtype == "bf16" and a.device == "cpu" else ""
    print(f"{what}: ft {ft:.0f}, torch {torch:.0f} tokens/s, ratio {ft / torch:.2f}; "
          f"peak {peaks['ft'] / 2**30:.2f} and {peaks['torch'] / 2**30:.2f} GiB, ratio {peaks['ft'] / peaks['torch']:.2f}")
    print(json.dumps(dict(what=what, ft=ft, torch=torch, ratio=ft / torch, peak_ft=peaks["ft"], peak_torch=peaks["torch"])))


main()
