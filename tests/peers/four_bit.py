"""Hands what `ft quantize` writes to transformers with bitsandbytes, and trains LoRA on it with PEFT, beside `ft`.

    python four_bit.py FT

Models are the reference cases, mixtures too, made wider: bitsandbytes' CPU kernels want a last dimension that is a
multiple of 64. They are f32, because bitsandbytes 0.50.2's forward product does not round decoded values to the dtype
that the quantization records, and its backward product does (`ft` rounds in both); in f32 there is nothing to round.

Columns:
  codes     tensors whose codes or scales are not those that bitsandbytes itself makes of the model (0 is wanted)
  logprob   log-probabilities of tokens, `ft eval` against transformers with bitsandbytes: largest difference
  curve     loss of 8 steps of LoRA, `ft run` against PEFT on bitsandbytes' linears: largest relative difference
  final     logits with what `ft` trained against logits with what PEFT trained, relative L2
  effect    how far training moved the logits: not a bar to stay under, but to be over
"""
import copy, json, os, shutil, sys, tempfile, warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures"))

import torch
import bitsandbytes as bnb
import bitsandbytes.functional as F
from peft import LoraConfig, PeftConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import make as M
from check import Failed, call, rel

BARS = dict(codes=0, logprob=1e-5, curve=1e-5, final=1e-4)
EFFECT = 1e-3
COLUMNS = ["codes", "logprob", "curve", "final", "effect"]
WIDE = dict(hidden_size=64, intermediate_size=128)
WIDE_MOE = dict(hidden_size=64, moe_intermediate_size=64)
CASES = {
    "qwen3-dense": (WIDE, dict(target_modules=M.ATTN + M.MLP)),
    "mixtral": (dict(hidden_size=64, intermediate_size=64), dict(target_modules=["q_proj", "v_proj", "w1", "w2", "w3"])),
    "qwen3-moe": (dict(intermediate_size=128, **WIDE_MOE), dict(target_modules=M.ATTN + M.MLP + ["gate"])),
}


def load(folder, linears):
    """The checkpoint as transformers loads it: every decoder linear 4-bit, and nothing missing or over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True)
    wrong = {k: sorted(v)[:3] for k, v in info.items() if v}
    if wrong:
        raise Failed(f"transformers: {wrong}")
    four = {n: m for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)}
    if set(four) != set(linears):
        raise Failed(f"4-bit in transformers and not in ft, or the other way: {sorted(set(four) ^ set(linears))[:3]}")
    for m in four.values():
        m.compute_dtype, m.compute_type_is_set = torch.float32, True
        m.support_avx512bf16_for_cpu = False       # it would multiply in bf16
    return model.eval()


def codes(folder, weights, linears):
    """How many tensors of the checkpoint are not what bitsandbytes makes of the model's weights: codes to the bit; scales,
    which are in 8 bits, but for those half-way between two codes, where either is right (one in a hundred at most)."""
    held, apart, ties, scales = load_file(os.path.join(folder, "model.safetensors")), 0, 0, 0
    for name in linears:
        packed, state = F.quantize_4bit(weights[name + ".weight"].contiguous(), blocksize=64, quant_type="nf4", compress_statistics=True)
        parts = state.as_dict(packed=True)
        near = (held[name + ".weight.absmax"].int() - parts["absmax"].int()).abs()
        ties, scales = ties + int((near == 1).sum()), scales + near.numel()
        same = torch.equal(held[name + ".weight"].flatten(), packed.flatten()) and int(near.max()) <= 1
        apart += not (same and rel(held[name + ".weight.nested_absmax"], parts["nested_absmax"]) < 1e-6)
    if ties > 0.01 * scales:
        raise Failed(f"{ties} of {scales} scales differ from bitsandbytes'")
    return apart


def rows_of(steps):
    for step in steps:
        for mb in step:
            for ids, labels, mask in zip(mb["input_ids"], mb["labels"], mb["attention_mask"]):
                n = int(mask.sum())
                yield dict(input_ids=ids[:n].tolist(), labels=labels[:n].tolist())


def recipe(model, rules, data, out):
    return f'''[model]
source = {json.dumps(model)}
dtype = "f32"
{rules}
[data]
train = [{{ source = {json.dumps(data)}, format = "tokens" }}]
eval = [{{ source = {json.dumps(data)}, format = "tokens" }}]
max_length = 64
pack = false
shuffle = false
mask = "none"
[run]
steps = {M.STEPS}
batch_rows = 4
micro_rows = 2
device = "cpu"
output = {json.dumps(out)}
[optimizer]
lr = {M.LR}
weight_decay = {M.WD}
decay = "all"
warmup_steps = {M.WARMUP}
'''


def write(path, lines):
    with open(path, "w") as f:
        f.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    return path


@torch.no_grad()
def logprobs(ft, model, folder, work):
    """Of drawn tokens after prefixes of drawn rows: each is one supervised target, and so the loss of one evaluation."""
    g = torch.Generator().manual_seed(5)
    worst = 0.0
    for i in range(24):
        ids = torch.randint(3, 128, (4 + i % 9,), generator=g)
        labels = [-100] * (len(ids) - 1) + [int(torch.randint(3, 128, (1,), generator=g))]
        data = write(os.path.join(work, "one.jsonl"), [dict(input_ids=ids.tolist(), labels=labels)])
        path = write(os.path.join(work, "one.toml"), [recipe(folder, '[[train]]\nmodules = ["head"]\n', data, os.path.join(work, "none"))])
        mine = -json.loads(call(ft, "eval", path, "--json"))["loss"]
        theirs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, -2].double(), -1)[labels[-1]]
        worst = max(worst, abs(mine - float(theirs)))
    return worst


def check(ft, case, work):
    shape, lora = CASES[case]
    spec = copy.deepcopy(M.CASES[case])
    spec["config"].update(shape)
    cfg, dense = M.build(spec)
    source, folder, out = (os.path.join(work, n) for n in ("source", "four", "out"))
    dense.save_pretrained(source)
    weights = dense.state_dict()
    linears = [n for n, m in dense.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head" and not n.endswith(".gate")]
    call(ft, "quantize", source, "--out", folder)
    model = load(folder, linears)
    result = dict(codes=codes(folder, weights, linears), logprob=logprobs(ft, model, folder, work))

    # LoRA from one adapter, by PEFT and by ft
    steps = M.batches(cfg.vocab_size, spec["seed"], M.DISTINCT)
    steps = [steps[i % M.DISTINCT] for i in range(M.STEPS)]
    probe = steps[0][0]
    with torch.no_grad():
        base = M.forward(model, probe)
    torch.manual_seed(7)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", **lora)).eval()
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for n, p in peft.named_parameters():
            if "lora_B" in n:
                p.copy_(0.02 * torch.randn(p.shape, generator=g))
    init = os.path.join(work, "init")
    peft.save_pretrained(init)
    curve = M.train(peft.base_model.model, [p for p in peft.parameters() if p.requires_grad], steps)
    with torch.no_grad():
        theirs = M.forward(peft, probe)
    data = write(os.path.join(work, "rows.jsonl"), rows_of(steps[:M.DISTINCT]))
    call(ft, "run", write(os.path.join(work, "case.toml"), [recipe(folder, f"[lora]\ninit = {json.dumps(init)}\n", data, out)]))
    with open(os.path.join(out, "metrics.jsonl")) as f:
        mine = [e for e in map(json.loads, f) if e["event"] == "step"]
    if [e["target_tokens"] for e in mine] != [e["target_tokens"] for e in curve]:
        raise Failed("other target tokens")
    result["curve"] = max(rel(a["loss"], b["loss"]) for a, b in zip(mine, curve))
    adapter = os.path.join(out, "adapter")
    loaded = get_peft_model(load(folder, linears), PeftConfig.from_pretrained(adapter))
    told = set_peft_model_state_dict(loaded, load_peft_weights(adapter, device="cpu"))
    missing = [k for k in told.missing_keys if "lora_" in k]
    if missing or told.unexpected_keys:
        raise Failed(f"PEFT: missing {missing[:3]}, unexpected {list(told.unexpected_keys)[:3]}")
    with torch.no_grad():
        result["final"] = rel(M.forward(loaded.eval(), probe), theirs)
    result["effect"] = rel(theirs, base)
    over = [k for k, bar in BARS.items() if not result[k] <= bar]
    if not result["effect"] >= EFFECT:
        over.append("effect (training changed nothing)")
    return result, over


def main():
    ft, wanted = os.path.abspath(sys.argv[1]), sys.argv[2:] or list(CASES)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"{'case':<14}" + "".join(f"{c:>10}" for c in COLUMNS) + "  result", flush=True)
    failures = 0
    for case in wanted:
        work, result, verdict = tempfile.mkdtemp(prefix="ft-four-bit-"), {}, "ok"
        try:
            result, over = check(ft, case, work)
            verdict = "FAILED: over the bar: " + ", ".join(over) if over else "ok"
        except Exception as e:      # whatever a peer raises on our files is a failure of this line, not of the table
            verdict = f"FAILED: {e if isinstance(e, Failed) else repr(e)[:300]}"
        if verdict == "ok":
            shutil.rmtree(work)
        else:
            failures, verdict = failures + 1, f"{verdict} [{work}]"
        print(f"{case:<14}" + "".join(f"{result[c]:>10.1e}" if c in result else f"{'-':>10}" for c in COLUMNS) + "  " + verdict, flush=True)
    print(f"{len(wanted) - failures} of {len(wanted)} passed")
    return 1 if failures else 0


sys.exit(main())
