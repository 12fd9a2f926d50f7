#!/usr/bin/env python3
"""Holds `lora.init = "pissa" | "olora" | "loftq"` to PEFT's, on the reference cases.

    python tests/peers/initial.py target/release/ft [CASE ...]

Eight steps from where each begins. Prints how far the losses are apart; how far the logits of the adapter that `ft` wrote, on the
base as it is (loftq: on that base in NF4), are from those of the model that PEFT trained; and how far training moved these.
Exits with 1 where a bar does not hold. PEFT's LoftQ wants a GPU: its decomposition is called here on what `ft quantize`
leaves, with alpha = rank, for PEFT leaves the scale out. The versions are those of tests/fixtures/make.py.
"""
import json, os, sys, tempfile

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.loftq_utils import _low_rank_decomposition

import cases, check

sys.path.insert(0, os.path.join(cases.REFERENCE, ".."))
import make as M

BARS = dict(loss=1e-5, logits=1e-4, peft=1e-5)
EFFECT = 1e-3
CASES = ["qwen3-dense", "qwen2-bias", "mixtral"]
RANK, LR = 4, 1e-3
# name -> (init, alpha, more of [lora] and of LoraConfig)
KINDS = {
    "pissa": ("pissa", 6, {}),
    "pissa rslora": ("pissa", 3, dict(rslora=True)),
    "pissa dora": ("pissa", 8, dict(dora=True)),
    "olora": ("olora", 2, {}),
    "loftq": ("loftq", RANK, {}),
}


def in_nf4(ft, case, work):
    """The weights that `ft` quantizes, dequantized: by name. That they are bitsandbytes' is four_bit.sh's to check."""
    out = os.path.join(work, "nf4")
    check.call(ft, "quantize", os.path.realpath(os.path.join(cases.REFERENCE, case, "model")), "--out", out)
    t, values = check.load_file(os.path.join(out, "model.safetensors")), {}
    for name in [n.removesuffix(".absmax") for n in t if n.endswith(".weight.absmax")]:
        state = json.loads(bytes(t[name + ".quant_state.bitsandbytes__nf4"].tolist()))
        codes = t[name].flatten()
        nibbles = torch.stack([codes >> 4, codes & 15], 1).flatten().long()
        scales = t[name + ".nested_quant_map"][t[name + ".absmax"].long()]
        scales = scales * t[name + ".nested_absmax"].repeat_interleave(state["nested_blocksize"])[:len(scales)] + state["nested_offset"]
        flat = t[name + ".quant_map"][nibbles] * scales.repeat_interleave(state["blocksize"])[:len(nibbles)]
        values[name.removesuffix(".weight")] = flat.reshape(state["shape"])
    return values


def begun(case, kind, targets, four_bit):
    """PEFT's model as it begins."""
    init, alpha, more = KINDS[kind]
    model = check.load(os.path.join(cases.REFERENCE, case, "model"))
    whole = {}
    if init == "loftq":
        for n, m in model.named_modules():
            if n in four_bit:
                whole[n], m.weight.data = m.weight.data, four_bit[n].clone()
    config = LoraConfig(r=RANK, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM",
                        use_rslora=more.get("rslora", False), use_dora=more.get("dora", False),
                        init_lora_weights=True if init == "loftq" else init)
    model = get_peft_model(model, config)
    for n, m in model.named_modules():
        base = n.removeprefix("base_model.model.")
        if base in whole and hasattr(m, "lora_A"):
            parts = _low_rank_decomposition(whole[base] - m.base_layer.weight.data, reduced_rank=RANK)
            m.lora_A["default"].weight.data, m.lora_B["default"].weight.data = parts["R"].contiguous(), parts["L"].contiguous()
    return model.eval()


def theirs(case, kind, targets, four_bit, steps):
    """Losses of PEFT's model, its logits before and after."""
    model = begun(case, kind, targets, four_bit)
    rows = list(cases.rows(case))
    before = check.logits(model, rows)
    trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
    for n, p in model.named_parameters():
        p.requires_grad_(n in trained)
    opt = torch.optim.AdamW(list(trained.values()), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=M.WD)
    log = M.train(model.base_model.model, list(trained.values()), steps, opt=opt)
    return [e["loss"] for e in log], before, check.logits(model, rows)


def ours(ft, case, kind, targets, work):
    init, alpha, more = KINDS[kind]
    switches = "".join(f"{k} = true\n" for k in more)
    rules = f'[lora]\ninit = "{init}"\nrank = {RANK}\nalpha = {alpha}\n{switches}[[train]]\nmodules = {json.dumps(targets)}\n'
    data, out, recipe = (os.path.join(work, n) for n in ("rows.jsonl", "out", "r.toml"))
    with open(data, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in cases.rows(case))
    with open(recipe, "w") as f:
        f.write(cases.recipe(case, rules, data, out))
    quantize = ["model.quantize=nf4"] if init == "loftq" else []
    check.call(ft, "run", recipe, f"optimizer.lr={LR}", "run.eval_at_start=true", *quantize)
    steps, evals = check.metrics(out)
    return [e["loss"] for e in steps], evals[-1]["loss"], os.path.join(out, "adapter")


def main():
    ft, wanted, bad = sys.argv[1], sys.argv[2:] or CASES, 0
    for case in wanted:
        b = check.load_file(os.path.join(cases.REFERENCE, case, "batches.safetensors"))
        keys = ("input_ids", "labels", "attention_mask")
        distinct = [[{k: b[f"batch{i}.micro{j}.{k}"] for k in keys} for j in (0, 1)] for i in (0, 1)]
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets += ["w1", "w2", "w3"] if case == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
        for kind, (init, _, _) in KINDS.items():
            with tempfile.TemporaryDirectory() as work:
                four_bit = in_nf4(ft, case, work) if init == "loftq" else {}
                losses, before, after = theirs(case, kind, targets, four_bit, [distinct[i % 2] for i in range(8)])
                got, last, adapter = ours(ft, case, kind, targets, work)
                model = check.adapted(case, adapter)
                for n, m in model.named_modules():
                    n = n.removeprefix("base_model.model.").removesuffix(".base_layer")
                    if n in four_bit and isinstance(m, torch.nn.Linear):
                        m.weight.data = four_bit[n]
                loaded = check.logits(model, list(cases.rows(case)))
            off = dict(loss=check.rel(got, losses), logits=check.rel(loaded, after),
                       peft=check.rel(last, check.loss(loaded, list(cases.rows(case)))))
            effect = check.rel(after, before)
            over = [n for n, x in off.items() if not x <= BARS[n]] + ([] if effect > EFFECT else ["no effect"])
            bad += bool(over)
            print(f"{case}, {kind}: loss {off['loss']:.1e}, logits {off['logits']:.1e}, eval of ft and of PEFT with its adapter "
                  f"{off['peft']:.1e}; training moved logits by {effect:.1e}" + (f"  OVER: {over}" if over else ""), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
