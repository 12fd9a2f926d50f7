#!/usr/bin/env python3
"""Compares training steps of `ft` and of PyTorch with PEFT: alternating runs, same random model, same number of tokens.

    python benches/peers.py target/release/ft [--shape q100m] [--layers N] [--tokens 512] [--rounds 3] [--dtype f32]
                            [--base plain|nf4] [--train lora|full] [--recompute none|all] [--device cpu|cuda]
                            [--liger | --unsloth] [--threads 1 2 ..]

Needs torch, transformers and peft in this Python, bitsandbytes for `--base nf4`, liger-kernel for `--liger`, unsloth and a tokenizer
in data/model for `--unsloth`, which trains LoRA. `--recompute` applies to both.
Prints a line per run. Then, per thread count, prints the ratios of median tokens per second and of peak memory (process on
the CPU, device on CUDA), as text and as a line of JSON. Supports the dense shapes of benches/shapes.py.
"""
import argparse, gc, json, os, resource, shutil, statistics, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import shapes

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = dict(f32="float32", bf16="bfloat16")
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


def random_model(a, folder):
    from transformers import AutoConfig, AutoModelForCausalLM
    import torch

    shapes.write(folder, a.shape, a.layers)
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    with torch.device(a.device):
        return AutoModelForCausalLM.from_config(config, torch_dtype=getattr(torch, DTYPES[a.dtype]), attn_implementation="sdpa")


def peft_model(a):
    """A model of transformers that PEFT or full training has prepared."""
    if a.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        _apply_liger_kernel("llama" if a.shape.startswith("llama") else "qwen3")
    with tempfile.TemporaryDirectory() as d:
        model = random_model(a, d)
    if a.base == "nf4":
        in_4_bits(model, model.dtype, a.device)
    if a.train == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS))
    if a.recompute == "all":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def unsloth_model(a):
    """A model that Unsloth has loaded from a folder, with its LoRA."""
    from unsloth import FastLanguageModel
    import torch

    with tempfile.TemporaryDirectory() as d:
        random_model(a, d).save_pretrained(d)
        gc.collect()
        if a.device == "cuda":
            torch.cuda.empty_cache()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(os.path.dirname(HERE), "data", "model", name), d)
        model, _ = FastLanguageModel.from_pretrained(d, max_seq_length=a.tokens, dtype=getattr(torch, DTYPES[a.dtype]),
                                                     load_in_4bit=a.base == "nf4")
    return FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, target_modules=LINEARS,
                                            use_gradient_checkpointing=a.recompute == "all")


def torch_steps(a):
    """Runs the PyTorch side in this process: seconds of each step after the first, and peak memory."""
    # before torch and transformers, which it changes
    if a.unsloth:
        import unsloth  # noqa: F401
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(a.threads[0])
    model = unsloth_model(a) if a.unsloth else peft_model(a)
    model.train()
    if a.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    wait = torch.cuda.synchronize if a.device == "cuda" else lambda: None
    seconds = []
    for _ in range(STEPS + 1):
        ids = torch.randint(0, model.config.vocab_size, (1, a.tokens), device=a.device)
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
    kernels = p.add_mutually_exclusive_group()
    kernels.add_argument("--liger", action="store_true", help="PyTorch with the kernels of liger-kernel")
    kernels.add_argument("--unsloth", action="store_true", help="Unsloth, which trains LoRA")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count()], help="compare with each of these")
    a = p.parse_args()
    if a.unsloth and a.train == "full":
        p.error("--unsloth compares LoRA")
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
