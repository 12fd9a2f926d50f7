"""What is run on the reference cases: recipes as text, and which files they are compared with."""
import json, os

from safetensors.numpy import load_file

REFERENCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "reference")

# Runs that start from nothing, on every case: name -> rules. What they write has no reference; PEFT and
# transformers must still load it and compute what `ft` computed.
FRESH = {
    "fresh lora": '[lora]\nrank = 4\nalpha = 8\n[[train]]\nmodules = ["attention", "mlp"]\n',
    "fresh dora": '[lora]\nrank = 4\nalpha = 8\ndora = true\n[[train]]\nmodules = ["attention", "mlp"]\n',
    "fresh rslora": '[lora]\nrank = 4\nalpha = 8\nrslora = true\n[[train]]\nmodules = ["attention", "mlp"]\n',
    "fresh head": '[lora]\nrank = 4\nalpha = 8\n[[train]]\nmodules = ["head", "v_proj"]\n',
    # ranks and scales that differ by rule, one of them rsLoRA, and norms in full
    "fresh rules": '[[train]]\nmodules = ["attention"]\nrank = 2\nalpha = 4\n'
                   '[[train]]\nmodules = ["mlp"]\nlayers = "-1:"\nrank = 3\nalpha = 5\nrslora = true\n'
                   '[[train]]\nmodules = ["norms"]\nmethod = "full"\n',
    "fresh norms": '[[train]]\nmodules = ["norms", "o_proj"]\nmethod = "full"\n',
}


# The same for mixtures of experts.
MIXTURES = {
    "fresh lora": '[lora]\nrank = 4\nalpha = 8\n[[train]]\nmodules = ["attention", "experts", "router"]\n',
    "fresh dora": '[lora]\nrank = 4\nalpha = 8\ndora = true\n[[train]]\nmodules = ["experts", "router"]\n',
    # single experts and routers in full, others by LoRA of their own rank
    "fresh rules": '[[train]]\nmodules = ["experts"]\nexperts = [0, 2]\nrank = 3\nalpha = 5\nrslora = true\n'
                   '[[train]]\nmodules = ["experts"]\nlayers = "-1:"\nexperts = "1-1"\nmethod = "full"\n'
                   '[[train]]\nmodules = ["router"]\nmethod = "full"\n',
    "fresh router": '[[train]]\nmodules = ["router"]\nmethod = "full"\n[router]\naux_loss = 0.01\nz_loss = 0.001\n',
}


def config(case):
    with open(os.path.join(REFERENCE, case, "model", "config.json")) as f:
        return json.load(f)


def mixture(case):
    return config(case)["model_type"] in ("mixtral", "qwen2_moe", "qwen3_moe")


def names(path):
    """The tensors of a safetensors file: its header alone, whatever the dtypes."""
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        return [k for k in json.loads(f.read(size)) if k != "__metadata__"]


def fused(case):
    """Whether the checkpoint has all experts of a layer in one tensor, which transformers 4 does not read."""
    path = os.path.join(REFERENCE, case, "model", "model.safetensors")
    return os.path.exists(path) and any(k.endswith("experts.down_proj") for k in names(path))


def rows(case):
    """The rows of a case, in the order in which its batches hold them."""
    b = load_file(os.path.join(REFERENCE, case, "batches.safetensors"))
    for i in (0, 1):
        for j in (0, 1):
            for r in (0, 1):
                n = int(b[f"batch{i}.micro{j}.attention_mask"][r].sum())
                yield dict(input_ids=b[f"batch{i}.micro{j}.input_ids"][r][:n].tolist(),
                           labels=b[f"batch{i}.micro{j}.labels"][r][:n].tolist())


def runs(case):
    """(name, rules, what trajectory.json calls it or None, prefix of the reference adapter)"""
    yield "full", '[[train]]\nmodules = ["/.*/"]\nmethod = "full"\n', "full", None
    if mixture(case):
        coefficient = config(case)["router_aux_loss_coef"]
        yield "full aux", f'[[train]]\nmodules = ["/.*/"]\nmethod = "full"\n[router]\naux_loss = {coefficient}\n', "full_aux", None
    for prefix in ("", "head_", "save_", "select_", "dora_"):
        init = os.path.join(REFERENCE, case, prefix + "adapter_init")
        if os.path.isdir(init):
            yield prefix + "lora", f"[lora]\ninit = {json.dumps(os.path.realpath(init))}\n", prefix + "lora", prefix
    for name, rules in (MIXTURES if mixture(case) else FRESH).items():
        yield name, rules, None, None


def recipe(case, rules, data, out):
    """The recipe of 8 steps that trajectory.json was made with."""
    model = json.dumps(os.path.realpath(os.path.join(REFERENCE, case, "model")))
    source = f'[{{ source = {json.dumps(data)}, format = "tokens" }}]'
    return f'''name = "case"
{rules}
[model]
source = {model}
dtype = "f32"
[data]
train = {source}
eval = {source}
max_length = 64
pack = false
shuffle = false
mask = "none"
[run]
seed = 1
steps = 8
batch_rows = 4
micro_rows = 2
device = "cpu"
output = {json.dumps(out)}
[optimizer]
lr = 2e-3
weight_decay = 0.01
decay = "all"
warmup_steps = 2
'''
