"""Reward models and classifiers made by ft, loaded by transformers and PEFT: the loss and accuracy of `ft eval` are
those of their scores.

    python tests/peers/heads.py FT        (needs torch, transformers, peft, scikit-learn)
"""
import json, os, shutil, subprocess, sys, tempfile
import torch
import torch.nn.functional as F
from peft import PeftModel
from sklearn.metrics import f1_score
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

FT = os.path.abspath(sys.argv[1])
FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "preference")
NAMES = ["bad", "fair", "good"]
LORA = '[[train]]\nmodules = ["attention", "mlp"]\nrank = 8'
FULL = '[[train]]\nmodules = ["/.*/"]\nmethod = "full"'


def recipe(task, rule, rows, format):
    classes = f"[classify]\nlabels = {json.dumps(NAMES)}" if task == "classify" else ""
    source = f'[{{ source = "{rows}", format = "{format}" }}]'
    return f"""task = "{task}"
[model]
source = "m"
dtype = "f32"
{rule}
{classes}
[data]
train = {source}
eval = {source}
max_length = 64
[run]
steps = 1
batch_rows = 4
device = "cpu"
output = "out"
[optimizer]
lr = 1e-3
"""


def scores(model, rows):
    """Scores of lists of ids, padded on the right."""
    t = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), t, dtype=torch.long), torch.zeros(len(rows), t, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, :len(row)], mask[i, :len(row)] = torch.tensor(row), 1
    model.config.pad_token_id = 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.double()


def expected(task, model, tok):
    if task == "reward":
        pairs = [json.loads(line) for line in open(f"{FIXTURE}/pairs.ids.jsonl")]
        a, b = (scores(model, [p["prompt_ids"] + p[f"{side}_ids"] for p in pairs])[:, 0] for side in ("chosen", "rejected"))
        return dict(loss=-F.logsigmoid(a - b).mean().item(), accuracy=(a > b).double().mean().item(), margins=(a - b).mean().item())
    rows = [json.loads(line) for line in open(f"{FIXTURE}/labeled.jsonl")]
    label = torch.tensor([r["label"] if isinstance(r["label"], int) else NAMES.index(r["label"]) for r in rows])
    weight = torch.tensor([r.get("weight", 1.0) for r in rows]).double()
    s = scores(model, [tok(r["text"])["input_ids"] for r in rows])
    found = s.argmax(-1)
    loss = (weight * F.cross_entropy(s, label, reduction="none")).sum() / weight.sum()
    by_class = dict(zip(NAMES, f1_score(label, found, average=None, labels=range(3), zero_division=0)))
    return dict(loss=loss.item(), accuracy=(found == label).double().mean().item(), f1=f1_score(label, found, average="macro", zero_division=0),
                **{f"f1_{name}": f1 for name, f1 in by_class.items()})


def main():
    work = tempfile.mkdtemp(prefix="heads-")
    os.chdir(work)
    os.environ["FT_CACHE"] = os.path.join(work, "cache")
    shutil.copytree(f"{FIXTURE}/model", "m")
    for file in os.listdir(f"{FIXTURE}/tokenizer"):
        shutil.copy(f"{FIXTURE}/tokenizer/{file}", "m")
    tok = PreTrainedTokenizerFast(tokenizer_file="m/tokenizer.json", pad_token="<pad>")
    run = lambda *args: subprocess.run([FT, *args], check=True, capture_output=True, text=True).stdout
    bad = 0
    for task, outputs, rows, format in [("reward", 1, "pairs.ids.jsonl", "preference"), ("classify", 3, "labeled.jsonl", "labeled")]:
        for rule in (LORA, FULL):
            open("r.toml", "w").write(recipe(task, rule, f"{FIXTURE}/{rows}", format))
            run("run", "r.toml", "--overwrite")
            got = json.loads(run("eval", "out", "--json"))
            models = {}
            if rule == FULL:
                models["model"] = AutoModelForSequenceClassification.from_pretrained("out/model", dtype=torch.float32)
            else:
                base = AutoModelForSequenceClassification.from_pretrained("m", num_labels=outputs, dtype=torch.float32)
                models["adapter"] = PeftModel.from_pretrained(base, "out/adapter")
                run("merge", "out/adapter", "--out", "merged", "--overwrite", "--dtype", "f32")
                models["merged"] = AutoModelForSequenceClassification.from_pretrained("merged", dtype=torch.float32)
            for name, model in models.items():
                model.eval()
                config = model.config
                if task == "classify" and name != "adapter":
                    assert config.id2label == dict(enumerate(NAMES)) and config.label2id == {n: i for i, n in enumerate(NAMES)}, config
                assert config.num_labels == outputs, config
                want = expected(task, model, tok)
                apart = max(abs(got[k] - v) / max(abs(v), 0.1) for k, v in want.items() if k in got or v > 0)
                print(f"{task} {name}: {', '.join(f'{k} {v:.6f}' for k, v in want.items())}; apart {apart:.1e}")
                bad |= apart > 1e-5
    shutil.rmtree(work)
    sys.exit(bad)


if __name__ == "__main__":
    main()
