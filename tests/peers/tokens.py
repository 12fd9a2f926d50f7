#!/usr/bin/env python3
"""Holds `modules = ["new_tokens"]` to PEFT's `trainable_token_indices`, on the reference cases.

    python tests/peers/tokens.py target/release/ft [CASE ...]

Eight steps on rows of some tokens, alone or beside the LoRA of an adapter that PEFT began. Prints how far the losses are apart; the
gradients of the first step; the logits of the adapter that `ft` wrote, as PEFT loads it, from those of the model that PEFT trained;
the evaluation of `ft` from PEFT's with that adapter; and the merged model from it. Exits with 1 where a bar does not hold. The
versions are those of tests/fixtures/make.py.
"""
import json, os, sys, tempfile, warnings

import torch
from peft import LoraConfig, get_peft_model

import cases, check

sys.path.insert(0, os.path.join(cases.REFERENCE, ".."))
import make as M

BARS = dict(loss=1e-5, gradient=1e-5, logits=1e-4, peft=1e-5, merge=1e-5)
EFFECT = 1e-3
CASES = ["qwen3-dense", "llama-embed-head", "qwen2-bias", "mixtral"]
LR = 2e-3
ROWS = "token_adapter.trainable_tokens_delta"


def begun(case, ids, tied, lora):
    """PEFT's model as it begins."""
    model = check.load(os.path.join(cases.REFERENCE, case, "model"))
    lists = dict(embed_tokens=ids) if tied else dict(embed_tokens=ids, lm_head=ids)
    targets = ["q_proj", "v_proj"] if lora else "dummy-target-modules"
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM",
                                             trainable_token_indices=lists))
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(0, 0.02)
    return model.eval()


def theirs(model, case, steps):
    """Losses of PEFT's model, the gradients of its first step as they were clipped, its logits before and after."""
    rows = list(cases.rows(case))
    before, trained = check.logits(model, rows), {n: p for n, p in model.named_parameters() if p.requires_grad}
    opt = torch.optim.AdamW(list(trained.values()), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=M.WD)
    first = {}

    def keep(optimizer, args, kwargs):
        if not first:
            first.update({n.removeprefix("base_model.model.").replace(".default", ""): p.grad.clone() for n, p in trained.items()})

    opt.register_step_pre_hook(keep)
    log = M.train(model.base_model.model, list(trained.values()), steps, opt=opt)
    return [e["loss"] for e in log], first, before, check.logits(model, rows)


def ours(ft, case, ids, init, work):
    rules = (f"[lora]\ninit = {json.dumps(init)}\n" if init else
             f'[[train]]\nmodules = ["new_tokens"]\ntokens = {json.dumps(ids)}\n')
    data, out, recipe = (os.path.join(work, n) for n in ("rows.jsonl", "out", "r.toml"))
    with open(data, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in cases.rows(case))
    with open(recipe, "w") as f:
        f.write(cases.recipe(case, rules, data, out))
    check.call(ft, "run", recipe, f"optimizer.lr={LR}", "run.save_every=1", "run.keep=9")
    steps, evals = check.metrics(out)
    moments = check.load_file(os.path.join(out, "checkpoints", "step-00000001", "optimizer.safetensors"))
    gradients = {n.removesuffix(".exp_avg"): t / 0.1 for n, t in moments.items() if n.endswith(".exp_avg")}
    return [e["loss"] for e in steps], gradients, evals[-1]["loss"], os.path.join(out, "adapter")


def main():
    warnings.filterwarnings("ignore")
    ft, wanted, bad = os.path.abspath(sys.argv[1]), sys.argv[2:] or CASES, 0
    for case in wanted:
        b = check.load_file(os.path.join(cases.REFERENCE, case, "batches.safetensors"))
        keys = ("input_ids", "labels", "attention_mask")
        distinct = [[{k: b[f"batch{i}.micro{j}.{k}"] for k in keys} for j in (0, 1)] for i in (0, 1)]
        config = cases.config(case)
        ids, tied = [9, 3, 4, 5, config["vocab_size"] - 1], config["tie_word_embeddings"]
        for lora in (False, True):
            with tempfile.TemporaryDirectory() as work:
                model = begun(case, ids, tied, lora)
                init = os.path.join(work, "init") if lora else None
                if lora:
                    model.save_pretrained(init)
                losses, gradients, before, after = theirs(model, case, [distinct[i % 2] for i in range(8)])
                got, mine, last, adapter = ours(ft, case, ids, init, work)
                assert set(mine) == set(gradients), sorted(set(mine) ^ set(gradients))[:3]
                loaded = check.adapted(case, adapter)
                state = loaded.state_dict()
                held = check.load_file(os.path.join(adapter, "adapter_model.safetensors"))
                assert all(torch.equal(state[n + ".default"], t) for n, t in held.items() if n.endswith(ROWS)), "not loaded"
                loaded, rows = check.logits(loaded, list(cases.rows(case))), list(cases.rows(case))
                check.call(ft, "merge", adapter, "--out", os.path.join(work, "merged"))
                merged = check.logits(check.load(os.path.join(work, "merged")), rows)
            off = dict(loss=max(check.rel(a, b) for a, b in zip(got, losses)),
                       gradient=max(check.rel(mine[n], g) for n, g in gradients.items()), logits=check.rel(loaded, after),
                       peft=check.rel(last, check.loss(loaded, rows)), merge=check.rel(merged, loaded))
            effect = check.rel(after, before)
            over = [n for n, x in off.items() if not x <= BARS[n]] + ([] if effect > EFFECT else ["no effect"])
            bad += bool(over)
            print(f"{case}, {'tied' if tied else 'untied'}, {'beside LoRA' if lora else 'alone'}: "
                  + ", ".join(f"{n} {x:.1e}" for n, x in off.items()) + f"; training moved logits by {effect:.1e}"
                  + (f"  OVER: {over}" if over else ""), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
