"""Trains an adapter on Gemma 3 within a vision checkpoint with the names of its release, and holds it to PEFT: loaded onto transformers'
class with a vision tower, it must give the logits of the model that `ft merge` writes.

    python tests/peers/nested.py FT          needs torch, transformers 5 and peft 0.21
"""
import json, os, subprocess, sys, tempfile

import torch
from peft import PeftModel
from transformers import Gemma3ForConditionalGeneration

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "tests/fixtures/families/gemma3/model_nested")
RECIPE = """
[model]
source = {model}
dtype = "f32"
[[train]]
modules = ["attention", "mlp"]
rank = 4
[data]
train = [{{ source = "rows.jsonl", format = "tokens" }}]
[run]
steps = 8
batch_rows = 4
device = "cpu"
output = "a"
[optimizer]
lr = 1e-2
"""


def main():
    ft = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        with open("rows.jsonl", "w") as f:
            for i in range(16):
                ids = [(7 * i + 5 * j) % 97 + 3 for j in range(14)]
                f.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
        with open("r.toml", "w") as f:
            f.write(RECIPE.format(model=json.dumps(MODEL)))
        for args in (["run", "r.toml"], ["merge", "a/adapter", "--out", "m", "--dtype", "f32"]):
            subprocess.run([ft, *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        load = lambda path: Gemma3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        ids = torch.tensor([[5, 9, 20, 33, 40, 41, 7, 8]])
        logits = lambda model: model(input_ids=ids).logits
        with torch.no_grad():
            base, merged = load(MODEL), logits(load("m"))
            alone = logits(base)
            adapted = logits(PeftModel.from_pretrained(base, "a/adapter"))
    apart, moved = (float((adapted - x).norm() / x.norm()) for x in (merged, alone))
    print(f"{apart:.1e} from the merged model, {moved:.1e} from the base")
    return 0 if apart <= 1e-5 < moved else 1


sys.exit(main())
