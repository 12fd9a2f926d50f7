"""Exports the reference cases, the quickstart's model, and what it trains for this, to GGUF; the package gguf reads every key and tensor, which must
be those of the safetensors files to the bit. With llama.cpp's scripts, their files must say the same.

    tests/peers/gguf.sh FT [LLAMA.CPP]
"""
import json, os, shutil, struct, subprocess, sys, tempfile

import numpy as np
from gguf import GGUFReader

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
REFERENCE = os.path.join(ROOT, "tests/fixtures/reference")
FAMILIES = os.path.join(ROOT, "tests/fixtures/families")
MODELS = ["llama3-rope", "llama-yarn", "llama-embed-head", "mistral", "qwen2-bias", "qwen3-dense", "mixtral"]
LATER = ["phi3", "phi3-long", "glm4"]
# not held against llama.cpp's scripts, whose keys have windows, and which want files of a tokenizer
ALONE = ["mistral", *LATER]
ADAPTERS = ["llama3-rope", "llama-yarn", "mistral", "qwen2-bias", "qwen3-dense"]
RECIPE = """
[model]
{model}
[[train]]
{rule}
[data]
train = [{{ source = {rows}, format = "tokens" }}]
[run]
steps = 3
batch_rows = 4
device = "cpu"
[optimizer]
lr = 1e-2
"""
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}
ROPE = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
           "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
# what we say beside llama.cpp's scripts, which leave it to defaults, and what they say that means nothing to llama.cpp
OURS = ("attention.key_length", "attention.value_length", "vocab_size", "rope.dimension_count", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "add_bos_token", "file_type", "quantization_version", "eot_token_id", "rope.freq_base")
THEIRS = ("general.name", "general.basename", "general.size_label", "general.finetune", "general.version", "general.organization",
          "general.base_model", "general.tags", "general.license", "add_eos_token", "add_sep_token",
          "general.dataset", "general.language", "general.description", "general.repo_url", "GGUF.")


def safetensors(folder):
    """Tensors as f32 (exact: files hold f32, bf16 or f16), with their dtypes."""
    out = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        data = open(os.path.join(folder, name), "rb").read()
        n = struct.unpack("<Q", data[:8])[0]
        for key, info in json.loads(data[8:8 + n]).items():
            if key == "__metadata__":
                continue
            a, b = info["data_offsets"]
            raw = data[8 + n + a:8 + n + b]
            if info["dtype"] == "BF16":
                t = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                t = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[info["dtype"]]).astype(np.float32)
            out[key] = t.reshape(info["shape"])
    return out


def rounded(x, kind):
    """The bits of a value in a dtype, rounded to nearest even."""
    if kind == "F32":
        return x.astype(np.float32).view(np.uint32)
    if kind == "F16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(reader):
    out = {}
    for t in reader.tensors:
        kind = t.tensor_type.name
        shape = [int(n) for n in reversed(t.shape)]
        raw = np.ascontiguousarray(t.data).tobytes()
        out[t.name] = (kind, np.frombuffer(raw, np.uint32 if kind == "F32" else np.uint16).reshape(shape))
    return out


def keys(reader):
    return {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def order(x, heads):
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def expected(weights, config):
    """Every tensor of the file by llama.cpp's name, f32."""
    llama = config["model_type"] in ("llama", "mistral", "mixtral")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads", config["num_attention_heads"])}
    out, experts = {}, {}
    for name, x in weights.items():
        module, part = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            _, _, layer, rest = module.split(".", 3)
            if ".experts." in rest:
                _, number, linear = rest.rsplit(".", 2)
                experts.setdefault(f"blk.{layer}.{EXPERTS[linear]}.weight", {})[int(number)] = x
                continue
            last = rest.rsplit(".", 1)[-1]
            if llama and last in heads:
                x = order(x, heads[last])
            out[f"blk.{layer}.{NAMES[rest]}.{part}"] = x
        elif not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            out[f"{NAMES[module]}.{part}"] = x
    for name, by in experts.items():
        out[name] = np.stack([by[e] for e in range(len(by))])
    return out


def f32_always(name, x):
    return x.ndim == 1 or name.endswith("_norm.weight") or "ffn_gate_inp" in name


def run(*args):
    p = subprocess.run(args, capture_output=True, text=True)
    if p.returncode:
        raise AssertionError(f"{os.path.basename(args[0])} {args[1]}: exit {p.returncode}: {(p.stderr or p.stdout).strip()[-400:]}")


def same_files(ours, theirs):
    """Keys and tensors of two files; gives what differs."""
    a, b = GGUFReader(ours), GGUFReader(theirs)
    wrong = []
    ka, kb = keys(a), keys(b)
    for k in sorted(set(ka) | set(kb)):
        if any(k.startswith(t) or k.endswith(t) for t in THEIRS):
            continue
        if k not in kb and k.endswith(OURS):
            continue
        x, y = ka.get(k), kb.get(k)
        if x != y and not (isinstance(x, float) and isinstance(y, (int, float)) and abs(x - y) <= 1e-6 * abs(y)):
            wrong.append(f"{k}: {str(x)[:60]} for {str(y)[:60]}")
    ta, tb = tensors(a), tensors(b)
    for n in sorted(set(ta) | set(tb)):
        if n not in ta or n not in tb:
            wrong.append(f"{n}: only in {'ours' if n in ta else 'theirs'}")
            continue
        (ka_, x), (kb_, y) = ta[n], tb[n]
        if n == "rope_freqs.weight":
            if not np.allclose(x.view(np.float32), y.view(np.float32), rtol=1e-6):
                wrong.append(f"{n}: {x.view(np.float32)} for {y.view(np.float32)}")
        elif ka_ != kb_ or x.shape != y.shape or not np.array_equal(x, y):
            wrong.append(f"{n}: {ka_} {x.shape} for {kb_} {y.shape}, or other values")
    return wrong


CONVERT = """
import sys, runpy
sys.path[:0] = [{llama!r}, {llama!r} + "/gguf-py"]
import conversion.base as base
# its list of pre-tokenizers is by hashes of published vocabularies, of which ours is none
own = base.TextModel.get_vocab_base_pre
def pre(self, tokenizer):
    try:
        return own(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"
base.TextModel.get_vocab_base_pre = pre
if {bare!r}:
    base.TextModel._set_vocab_gpt2 = lambda self: self._set_vocab_none()
    base.TextModel._set_vocab_sentencepiece = lambda self, *a, **k: self._set_vocab_none()
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(llama, script, *args, bare=False):
    argv = [os.path.join(llama, script), *args]
    run(sys.executable, "-c", CONVERT.format(llama=llama, argv=argv, bare=bare))


def main():
    ft = os.path.abspath(sys.argv[1])
    llama = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else None
    work = tempfile.mkdtemp(prefix="ft-gguf-")
    failures = count = 0

    def line(what, check):
        nonlocal failures, count
        try:
            wrong = check()
        except AssertionError as e:
            wrong = [str(e)]
        failures, count = failures + bool(wrong), count + 1
        print(f"{what:<44}" + ("ok" if not wrong else "FAILED " + "; ".join(wrong)[:600]), flush=True)

    def model(folder, word, name):
        def check():
            out = os.path.join(work, f"{name}-{word}")
            run(ft, "export", folder, "--to", "gguf", "--dtype", word, "--out", out)
            config = json.load(open(os.path.join(folder, "config.json")))
            want, got = expected(safetensors(folder), config), tensors(GGUFReader(os.path.join(out, "model.gguf")))
            wrong = [f"{n}: only on one side" for n in sorted((set(want) ^ set(got)) - ROPE)]
            for n in sorted(set(want) & set(got)):
                kind = "F32" if f32_always(n, want[n]) else word.upper()
                if got[n][0] != kind or got[n][1].shape != want[n].shape or not np.array_equal(got[n][1], rounded(want[n], kind)):
                    wrong.append(f"{n}: {got[n][0]} {got[n][1].shape}, or other values")
            return wrong
        return check

    def against(folder, word, name):
        def check():
            theirs = os.path.join(work, f"{name}-{word}-theirs.gguf")
            bare = not os.path.exists(os.path.join(folder, "tokenizer.json"))
            convert(llama, "convert_hf_to_gguf.py", folder, "--outtype", word, "--outfile", theirs, bare=bare)
            return same_files(os.path.join(work, f"{name}-{word}", "model.gguf"), theirs)
        return check

    def train(name, model, rule):
        """The folder of a run."""
        rows = os.path.join(work, "rows.jsonl")
        with open(rows, "w") as f:
            for i in range(16):
                ids = [(7 * i + 5 * j * j) % 61 for j in range(12)]
                f.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
        recipe, out = os.path.join(work, f"{name}.toml"), os.path.join(work, f"{name}-run")
        with open(recipe, "w") as f:
            f.write(RECIPE.format(model=model, rule=rule, rows=json.dumps(rows)))
        run(ft, "run", recipe, f"run.output={json.dumps(out)}")
        return out

    def adapter(case):
        def check():
            base = os.path.join(REFERENCE, case, "model")
            rule = 'modules = ["attention", "mlp"]\nrank = 4\nalpha = 12'
            trained, out = train(case, f"source = {json.dumps(base)}", rule), os.path.join(work, f"{case}-adapter")
            run(ft, "export", trained, "--to", "gguf", "--out", out)
            ours = os.path.join(out, "adapter.gguf")
            got = GGUFReader(ours)
            assert got.fields["general.type"].contents() == "adapter" and got.fields["adapter.lora.alpha"].contents() == 12
            assert len(got.tensors) == 2 * 2 * 7, f"{len(got.tensors)} tensors"
            if not llama or case in ALONE:
                return []
            theirs = ours + ".theirs"
            convert(llama, "convert_lora_to_gguf.py", os.path.join(trained, "adapter"), "--base", base, "--outtype", "f32", "--outfile", theirs)
            return same_files(ours, theirs)
        return check

    def sparse():
        """A Qwen3-MoE with experts in each layer, which no case of the fixtures is."""
        with open(os.path.join(REFERENCE, "qwen3-moe/model/config.json")) as f:
            config = json.load(f)
        folder = os.path.join(work, "sparse")
        os.mkdir(folder)
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump({**config, "mlp_only_layers": [], "decoder_sparse_step": 1}, f)
        rule = 'modules = ["attention", "experts", "router", "norms", "embedding", "head"]\nmethod = "full"'
        return os.path.join(train("sparse", f'source = {json.dumps(folder)}\nweights = "random"', rule), "model")

    folders = [(c, os.path.join(REFERENCE, c, "model")) for c in MODELS] + [("quickstart", os.path.join(ROOT, "data/model")), ("qwen3-moe", sparse())]
    folders += [(c, os.path.join(FAMILIES, c, "model")) for c in LATER]
    folders += [(os.path.basename(f), f) for f in os.environ.get("GGUF_MODELS", "").split(":") if f]
    for name, folder in folders:
        for word in ("f32", "f16", "bf16"):
            line(f"{name} {word}, gguf", model(folder, word, name))
            if llama and name not in ALONE:
                line(f"{name} {word}, llama.cpp", against(folder, word, name))
    for case in ADAPTERS:
        line(f"{case} adapter", adapter(case))
    shutil.rmtree(work)
    print(f"{count - failures} of {count} passed")
    return 1 if failures or not count else 0


sys.exit(main())
