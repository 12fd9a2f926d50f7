"""Runs `ft` on the reference cases; PEFT and transformers load what it wrote and must compute the same.

    python check.py FT [CASE ...]

Columns, each a relative difference (L2 for logits and tensors):
  curve     loss of the 8 steps against PyTorch's
  eval      the last evaluation that `ft` reported against the loss that PEFT (or transformers) computes with its files
  final     logits with what `ft` trained against logits with what PyTorch trained
  merge     logits of the model that `ft merge` wrote against PEFT's, unmerged
  effect    how far training moved the logits: not a bar to stay under, but to be over
"""
import glob, json, os, shutil, subprocess, sys, tempfile, warnings

import torch
from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import cases

BARS = dict(curve=1e-5, eval=1e-5, final=1e-4, merge=1e-5)
EFFECT = 1e-3
COLUMNS = ["curve", "eval", "final", "merge", "effect"]


class Failed(Exception):
    """Why a line of the table failed."""


def rel(a, b):
    """Relative L2 difference; what is not finite is infinitely far."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    x = float((a - b).norm() / b.norm())
    return x if x == x else float("inf")


def call(*args):
    p = subprocess.run(args, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if p.returncode:
        text = (p.stderr or p.stdout).strip().splitlines()
        raise Failed(f"`ft {args[1]}` exit {p.returncode}: {' '.join(text[-3:])[-300:]}")
    return p.stdout


def load(folder):
    """A model as transformers loads it; every key must be there and none over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True)
    wrong = {k: sorted(v)[:3] for k, v in info.items() if v}
    if wrong:
        raise Failed(f"transformers on {os.path.basename(folder)}/: {wrong}")
    return model.eval()


def adapted(case, folder):
    """The case's model under an adapter as PEFT loads it; every key must be there and none over."""
    model = get_peft_model(load(os.path.join(cases.REFERENCE, case, "model")), PeftConfig.from_pretrained(folder))
    state = load_peft_weights(folder, device="cpu")
    result = set_peft_model_state_dict(model, state)
    missing = [k for k in result.missing_keys if "lora_" in k or "modules_to_save" in k]
    if missing or result.unexpected_keys:
        raise Failed(f"PEFT: missing {missing[:3]}, unexpected {list(result.unexpected_keys)[:3]}")
    if not state:
        raise Failed("PEFT: the adapter is empty")
    return model.eval()


@torch.no_grad()
def logits(model, rows):
    """Logits of every row, one after the other, [tokens, vocabulary]."""
    return torch.cat([model(input_ids=torch.tensor([r["input_ids"]]), use_cache=False).logits[0] for r in rows])


def loss(flat, rows):
    """Sum of the token losses over their number."""
    total, count, start = 0.0, 0, 0
    for r in rows:
        n = len(r["input_ids"])
        labels = torch.tensor(r["labels"][1:])
        total += float(torch.nn.functional.cross_entropy(
            flat[start:start + n - 1].double(), labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
        start += n
    return total / count


def metrics(out):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        events = [json.loads(line) for line in f]
    return ([e for e in events if e["event"] == "step"], [e for e in events if e["event"] == "eval"])


def against_pytorch(case, name, steps):
    want = json.load(open(os.path.join(cases.REFERENCE, case, "trajectory.json")))[name]
    if len(want) != len(steps):
        raise Failed(f"{len(steps)} steps logged, {len(want)} wanted")
    for got, ref in zip(steps, want):
        if got["target_tokens"] != ref["target_tokens"]:
            raise Failed(f"step {ref['step']}: {got['target_tokens']} target tokens, {ref['target_tokens']} wanted")
    return max(rel(got["loss"], ref["loss"]) for got, ref in zip(steps, want))


def full_final(case, folder):
    """Tensors of layer 0 and the norms against PyTorch's, the norms of all others. A key bias, which softmax nearly
    cancels, is allowed ten times as much."""
    mine = {}
    for f in glob.glob(os.path.join(folder, "*.safetensors")):
        mine.update(load_file(f))
    norms = json.load(open(os.path.join(cases.REFERENCE, case, "trajectory.json")))["full_final_norms"]
    missing = sorted(set(norms) - set(mine))
    if missing:
        raise Failed(f"not in model/: {missing[:3]}")
    exact = load_file(os.path.join(cases.REFERENCE, case, "full_final.safetensors"))
    far = [(n, rel(mine[n], v)) for n, v in exact.items()] + [(n, rel(mine[n].double().norm(), v)) for n, v in norms.items()]
    return max(x / 10 if n.endswith("k_proj.bias") else x for n, x in far)


def check(ft, case, name, rules, curve, prefix, work):
    rows = list(cases.rows(case))
    data, out = os.path.join(work, "rows.jsonl"), os.path.join(work, "out")
    with open(data, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    recipe = os.path.join(work, "case.toml")
    with open(recipe, "w") as f:
        f.write(cases.recipe(case, rules, data, out))
    call(ft, "run", recipe)
    steps, evals = metrics(out)
    result = {}
    if curve:
        result["curve"] = against_pytorch(case, curve, steps)
    base = logits(load(os.path.join(cases.REFERENCE, case, "model")), rows)
    bars = dict(BARS)
    if name in ("full", "full aux"):
        mine = logits(load(os.path.join(out, "model")), rows)
        if name == "full":
            result["final"] = full_final(case, os.path.join(out, "model"))
    else:
        adapter = os.path.join(out, "adapter")
        mine = logits(adapted(case, adapter), rows)
        if prefix is not None:
            reference = os.path.join(cases.REFERENCE, case, prefix + "adapter_final")
            result["final"] = rel(mine, logits(adapted(case, reference), rows))
        merged = os.path.join(work, "merged")
        call(ft, "merge", adapter, "--out", merged)
        result["merge"] = rel(logits(load(merged), rows), mine)
        if json.load(open(os.path.join(merged, "config.json"))).get("dtype", "float32") != "float32" or case == "qwen3-one-kv":
            bars["merge"] = 2e-2    # merged into weights of 8 bits of mantissa
    if not evals:
        raise Failed("no evaluation in metrics.jsonl")
    result["eval"] = rel(evals[-1]["loss"], loss(mine, rows))
    result["effect"] = rel(mine, base)
    over = [k for k, bar in bars.items() if k in result and not result[k] <= bar]
    if not result["effect"] >= EFFECT:
        over.append("effect (training changed nothing)")
    return result, over


def main():
    ft, wanted = os.path.abspath(sys.argv[1]), sys.argv[2:] or sorted(c for c in os.listdir(cases.REFERENCE) if not cases.fused(c))
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    print(f"{'case':<18}{'run':<14}" + "".join(f"{c:>10}" for c in COLUMNS) + "  result", flush=True)
    failures = count = 0
    for case in wanted:
        for name, *rest in cases.runs(case):
            work = tempfile.mkdtemp(prefix="ft-peers-")
            result, verdict = {}, "ok"
            try:
                result, over = check(ft, case, name, *rest, work)
                if over:
                    verdict = "FAILED: over the bar: " + ", ".join(over)
            except Exception as e:      # whatever a peer raises on our files is a failure of this line, not of the table
                verdict = f"FAILED: {e if isinstance(e, Failed) else repr(e)[:300]}"
            count += 1
            if verdict == "ok":
                shutil.rmtree(work)
            else:
                failures += 1
                verdict += f" [{work}]"
            print(f"{case:<18}{name:<14}" + "".join(f"{result[c]:>10.1e}" if c in result else f"{'-':>10}" for c in COLUMNS)
                  + "  " + verdict, flush=True)
    print(f"{count - failures} of {count} passed")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
