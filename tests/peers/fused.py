"""Exports the adapters of the mixture cases with `ft export --to peft-fused`; PEFT loads them over transformers 5, where
all experts of a layer are one parameter, and must compute what PyTorch computed.

    tests/peers/fused.sh FT
"""
import os, shutil, subprocess, sys, tempfile, warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import cases

BAR, EFFECT = 1e-5, 1e-3


@torch.no_grad()
def logits(model, batches):
    mask = batches["batch0.micro0.attention_mask"]
    out = model(input_ids=batches["batch0.micro0.input_ids"], attention_mask=mask, use_cache=False).logits
    return out[mask.bool()]


def rel(a, b):
    x = float((a - b).norm() / b.norm())
    return x if x == x else float("inf")


def main():
    ft = os.path.abspath(sys.argv[1])
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    failures = count = 0
    for case in sorted(c for c in os.listdir(cases.REFERENCE) if cases.mixture(c)):
        folder = os.path.join(cases.REFERENCE, case)
        for prefix in ("", "select_"):
            adapter = os.path.join(folder, prefix + "adapter_final")
            if not os.path.isdir(adapter):
                continue
            work = tempfile.mkdtemp(prefix="ft-fused-")
            base, out = os.path.join(folder, "model"), os.path.join(work, "out")
            p = subprocess.run([ft, "export", adapter, "--to", "peft-fused", "--base", base, "--out", out], capture_output=True, text=True)
            apart = effect = float("inf")
            if p.returncode == 0:
                batches = load_file(os.path.join(folder, "batches.safetensors"))
                model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
                before = logits(model, batches)
                want = load_file(os.path.join(folder, prefix + "merged_logits.safetensors"))["logits"]
                want = want[batches["batch0.micro0.attention_mask"].bool()]
                apart, effect = rel(logits(PeftModel.from_pretrained(model, out).eval(), batches), want), rel(before, want)
            good = apart <= BAR and effect >= EFFECT
            failures, count = failures + (not good), count + 1
            print(f"{case:<18}{prefix + 'adapter':<16}{apart:>10.1e}{effect:>10.1e}  " + ("ok" if good else f"FAILED {p.stderr.strip()[-300:]}"))
            shutil.rmtree(work)
    print(f"{count - failures} of {count} passed")
    return 1 if failures or not count else 0


sys.exit(main())
