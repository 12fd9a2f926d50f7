#!/usr/bin/env python3
"""Holds LoRA+ (`optimizer.lr_scale_b`) to PEFT's `create_loraplus_optimizer`, from the adapters of the reference cases.

    python tests/peers/loraplus.py target/release/ft [CASE ...]

Eight steps with a rate of 16 times A's for B. Prints, for each case, how far the losses of the steps and the trained adapter are
apart, and how far the factor moved that adapter from the one without it; exits with 1 where a bar does not hold. The versions
are those of tests/fixtures/make.py.
"""
import json, os, sys, tempfile

import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file

import cases, check

sys.path.insert(0, os.path.join(cases.REFERENCE, ".."))
import make as M

RATIO = 16
LR = 5e-4
BARS = dict(loss=1e-5, adapter=1e-4)
CASES = ["qwen3-dense", "qwen2-bias", "mixtral"]


def theirs(case, steps):
    """Losses of PEFT's optimizer, and what it trained."""
    model = check.adapted(case, os.path.join(cases.REFERENCE, case, "adapter_init"))
    trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
    for n, p in model.named_parameters():
        p.requires_grad_(n in trained)
    opt = create_loraplus_optimizer(model, torch.optim.AdamW, lr=LR, loraplus_lr_ratio=RATIO, loraplus_weight_decay=M.WD,
                                    betas=(0.9, 0.999), eps=1e-8)
    log = M.train(model.base_model.model, list(trained.values()), steps, opt=opt)
    return [e["loss"] for e in log], {n.replace(".default", ""): p.detach() for n, p in trained.items()}


def ours(ft, case, work, ratio):
    init = os.path.realpath(os.path.join(cases.REFERENCE, case, "adapter_init"))
    with open(os.path.join(init, "adapter_config.json")) as f:
        config = json.load(f)
    rules = (f'[lora]\ninit = {json.dumps(init)}\nrank = {config["r"]}\nalpha = {config["lora_alpha"]}\n'
             f'rslora = {json.dumps(config["use_rslora"])}\n[[train]]\nmodules = {json.dumps(config["target_modules"])}\n')
    data, out, recipe = (os.path.join(work, n) for n in ("rows.jsonl", f"out{ratio}", "r.toml"))
    with open(data, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in cases.rows(case))
    with open(recipe, "w") as f:
        f.write(cases.recipe(case, rules, data, out))
    check.call(ft, "run", recipe, f"optimizer.lr={LR}", f"optimizer.lr_scale_b={ratio}")
    events = [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"))]
    return [e["loss"] for e in events if e["event"] == "step"], load_file(os.path.join(out, "adapter/adapter_model.safetensors"))


def main():
    ft, wanted, bad = sys.argv[1], sys.argv[2:] or CASES, 0
    for case in wanted:
        b = load_file(os.path.join(cases.REFERENCE, case, "batches.safetensors"))
        keys = ("input_ids", "labels", "attention_mask")
        distinct = [[{k: b[f"batch{i}.micro{j}.{k}"] for k in keys} for j in (0, 1)] for i in (0, 1)]
        losses, want = theirs(case, [distinct[i % 2] for i in range(8)])
        with tempfile.TemporaryDirectory() as work:
            got, adapter = ours(ft, case, work, RATIO)
            _, plain = ours(ft, case, work, 1)
        assert set(want) == set(adapter), sorted(set(want) ^ set(adapter))[:3]
        off = dict(loss=check.rel(got, losses), adapter=max(check.rel(adapter[n], w) for n, w in want.items()))
        effect = max(check.rel(adapter[n], w) for n, w in plain.items())
        over = [n for n, x in off.items() if not x <= BARS[n]] + ([] if effect > 1e-2 else ["no effect"])
        bad += bool(over)
        print(f"{case}: loss {off['loss']:.1e}, adapter {off['adapter']:.1e}, moved by the factor {effect:.1e}" + (f"  OVER: {over}" if over else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
