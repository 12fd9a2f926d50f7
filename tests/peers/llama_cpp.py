"""Loads what `ft export --to gguf` writes into llama.cpp itself, and compares its probabilities with transformers'.

    python llama_cpp.py FT NODE_FOLDER [FAMILY ...]        NODE_FOLDER holds node_modules with node-llama-cpp

The word "tokenizers" among the families stands for the published tokenizers of published.py. PEERS_TOKENIZERS="FAMILY=FOLDER:..." names
folders with a published tokenizer.json. llama.cpp's tokens are compared with those of the package tokenizers.
"""
import json, os, shutil, subprocess, sys, tempfile

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMMON = dict(vocab_size=285, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=0)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LINEAR = dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
              linear_conv_kernel_dim=4, full_attention_interval=4, tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, norm_topk_prob=True,
               decoder_sparse_step=1, mlp_only_layers=[])
SECTIONS = dict(partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
GEMMA4 = dict(head_dim=16, global_head_dim=32, sliding_window=8, final_logit_softcapping=30.0)
LONG = dict(rope_type="longrope", short_factor=[1.0 + i / 16 for i in range(8)], long_factor=[1.5 + 2.0 * i for i in range(8)])
# a family, and what follows a space
FAMILIES = {
    "llama": dict(num_hidden_layers=2, rope_parameters=ROPE),
    # heads wider than hidden_size over heads, as Mistral Nemo has them
    "mistral": dict(num_hidden_layers=2, head_dim=32, sliding_window=None, rope_parameters=ROPE),
    "mixtral": dict(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, rope_parameters=ROPE),
    "ministral": dict(num_hidden_layers=2, head_dim=16, sliding_window=8, layer_types=["full_attention"] * 2, rope_parameters=ROPE),
    "phi3": dict(num_hidden_layers=2, sliding_window=None, rope_parameters=ROPE),
    "phi3 partial": dict(num_hidden_layers=2, sliding_window=None, tie_word_embeddings=True, rope_parameters=dict(**ROPE, partial_rotary_factor=0.75)),
    # llama.cpp makes 256 of the context of llama_cpp.mjs
    "phi3 short": dict(num_hidden_layers=2, sliding_window=None, original_max_position_embeddings=256, max_position_embeddings=512,
                       rope_parameters=dict(rope_theta=10000.0, original_max_position_embeddings=256, **LONG)),
    "phi3 long": dict(num_hidden_layers=2, sliding_window=None, original_max_position_embeddings=16, max_position_embeddings=128,
                      rope_parameters=dict(rope_theta=10000.0, original_max_position_embeddings=16, **LONG)),
    "glm": dict(num_hidden_layers=2, head_dim=16, rope_parameters=dict(**ROPE, partial_rotary_factor=0.5)),
    "glm4": dict(num_hidden_layers=2, head_dim=32, attention_bias=True, rope_parameters=dict(**ROPE, partial_rotary_factor=0.5)),
    "olmo3": dict(num_hidden_layers=5, sliding_window=8,
                  layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                  rope_parameters=dict(sliding_attention=ROPE, full_attention=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0,
                                                                                   original_max_position_embeddings=16))),
    "qwen2_moe": dict(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
                      norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[], rope_parameters=ROPE),
    "qwen3": dict(num_hidden_layers=2, head_dim=16, rope_parameters=ROPE),
    "olmo2": dict(num_hidden_layers=2, rope_parameters=ROPE),
    "smollm3": dict(num_hidden_layers=4, no_rope_layer_interval=4, rope_parameters=ROPE),
    "gpt_oss": dict(num_hidden_layers=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, tie_word_embeddings=False,
                    rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, original_max_position_embeddings=64, truncate=True)),
    "gpt_oss mxfp4": dict(num_experts_per_tok=4),
    "qwen3_next": dict(num_hidden_layers=4, **LINEAR, **EXPERTS, rope_parameters=dict(**ROPE, partial_rotary_factor=0.25)),
    "qwen3_5_text": dict(num_hidden_layers=4, **LINEAR, rope_parameters=dict(**ROPE, **SECTIONS)),
    "qwen3_5_moe_text": dict(num_hidden_layers=4, **LINEAR, **EXPERTS, rope_parameters=dict(**ROPE, **SECTIONS)),
    "gemma4_text": dict(num_hidden_layers=6, **GEMMA4, hidden_size_per_layer_input=32, vocab_size_per_layer_input=285, num_kv_shared_layers=3,
                        use_double_wide_mlp=True, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2),
    "gemma4_text experts": dict(num_hidden_layers=3, **GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_double_wide_mlp=False,
                                attention_k_eq_v=True, num_global_key_value_heads=1,
                                layer_types=["sliding_attention", "sliding_attention", "full_attention"], enable_moe_block=True, num_experts=6,
                                top_k_experts=2, moe_intermediate_size=32),
    "gemma3_text": dict(num_hidden_layers=7, head_dim=32, query_pre_attn_scalar=32, sliding_window=8, sliding_window_pattern=6,
                        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0), sliding_attention=ROPE)),
}
# checked with an adapter too
ADAPTED = ["llama", "mistral", "mixtral", "phi3", "glm", "glm4", "olmo3", "qwen2_moe", "qwen3"]
# block and linears of experts in adapters
EXPERTS_OF = {"mixtral": ("block_sparse_moe", ["w1", "w3", "w2"]), "qwen2_moe": ("mlp", ["gate_proj", "up_proj", "down_proj"])}
# Sums in another order; llama.cpp's products on the CPU round activations to f16 where weights are f32 or f16, and to 8 bits where
# they are MXFP4. (There every token has all experts: rounding chooses others.)
BAR = 2e-2


def save_mxfp4(model, folder):
    """Puts the experts into MXFP4, as gpt-oss is released, in the model and in the folder."""
    sys.path.insert(0, os.path.join(ROOT, "tests/fixtures"))
    from make_families import from_mxfp4, to_mxfp4
    from safetensors.torch import save_file
    tensors = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                blocks, scales = to_mxfp4(p.transpose(1, 2))
                p.copy_(from_mxfp4(blocks, scales).transpose(1, 2))
                tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
            else:
                tensors[name] = p.detach().clone().contiguous()
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    model.config.architectures = ["GptOssForCausalLM"]
    model.config.save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    json.dump(config, open(path, "w"))


def linears(model):
    """Names of the linears of the layers, and their weights. Transformers has the experts of a layer in one, PEFT each alone."""
    for name, m in model.named_modules():
        # llama.cpp has the gate of a shared expert as a vector
        if ".layers." in name and isinstance(m, torch.nn.Linear) and not name.endswith("shared_expert_gate"):
            yield name, m.weight
        if isinstance(getattr(m, "gate_up_proj", None), torch.nn.Parameter):
            layer = name.rsplit(".", 2)[0]
            block, parts = EXPERTS_OF[model.config.model_type]
            for e, (both, down) in enumerate(zip(m.gate_up_proj, m.down_proj)):
                for part, weight in zip(parts, (*both.chunk(2), down)):
                    yield f"{layer}.{block}.experts.{e}.{part}", weight


def adapt(model, base, folder):
    """Writes LoRA on all linears of the layers, as PEFT does, and adds it to the weights."""
    from safetensors.torch import save_file
    tensors, names = {}, set()
    with torch.no_grad():
        for name, weight in linears(model):
            a, b = torch.randn(4, weight.shape[1]) * 0.2, torch.randn(weight.shape[0], 4) * 0.2
            tensors |= {f"base_model.model.{name}.lora_{h}.weight": t.contiguous() for h, t in (("A", a), ("B", b))}
            names.add(name)
            weight += b @ a * (6 / 4)
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=6, lora_dropout=0.0, bias="none", target_modules=sorted(names),
                  base_model_name_or_path=base)
    json.dump(config, open(os.path.join(folder, "adapter_config.json"), "w"))


def check(ft, node, family, work, adapted=False):
    torch.manual_seed(1)
    config = CONFIG_MAPPING[family.split()[0]](**{**COMMON, **FAMILIES.get(family.split()[0], {}), **FAMILIES[family]})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.dim() > 1 else 0.3) + (1 if p.dim() == 1 and family != "gemma3_text" else 0))
    folder = os.path.join(tempfile.mkdtemp(dir=work), family.replace(" ", "-"))
    if family.endswith("mxfp4"):
        save_mxfp4(model, folder)
    else:
        model.save_pretrained(folder)
    for f in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(ROOT, "tests/fixtures/tiny-tokenizer", f), folder)
    out = folder + ".gguf.d"
    subprocess.run([ft, "export", folder, "--to", "gguf", "--out", out, "--dtype", "f32", "--pre", "qwen2"], check=True, stdout=subprocess.DEVNULL)
    files = [os.path.join(out, "model.gguf")]
    if adapted:
        adapt(model, folder, folder + ".adapter")
        lora = folder + ".lora.d"
        subprocess.run([ft, "export", folder + ".adapter", "--to", "gguf", "--base", folder, "--out", lora], check=True, stdout=subprocess.DEVNULL)
        files.append(os.path.join(lora, "adapter.gguf"))
    ids = [(7 * i + 3) % 280 + 3 for i in range(24)]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].double().softmax(-1)
    try:
        rows = run(node, "llama_cpp.mjs", files[0], json.dumps(ids), *files[1:])
    except RuntimeError as e:
        return f"llama.cpp: {e}"
    worst = 0.0
    for at, row in enumerate(rows):
        got = torch.zeros_like(want[at])
        for token, probability in row:
            got[int(token)] = probability
        worst = max(worst, float((got - want[at]).abs().sum()) / 2)
    return f"{worst:.1e} of the probability is elsewhere" + ("" if worst <= BAR else "  OVER")


TEXTS = ["Hello, world!", "  two  spaces", "tabs\tand\nlines\n\n\nmore\n", "Ünïcödé 你好 😀 \u200d", "def f(x):\n    return x ** 2\n", "12345 3.14",
         "<start_of_turn>user\nHi<end_of_turn>\n", "<|start|>user<|message|>Hi<|end|>", "I'LL don't CAMELCase", "\u00a0nbsp \u3000wide", "aé\u0301"]


def run(node, script, *args):
    """What a script of this folder prints last."""
    here = os.path.dirname(os.path.abspath(__file__))
    shutil.copy(os.path.join(here, script), os.path.join(node, script))
    p = subprocess.run(["node", os.path.join(node, script), *args], cwd=node, capture_output=True, text=True)
    if p.returncode:
        raise RuntimeError(p.stderr.strip()[-400:])
    return json.loads(p.stdout.strip().splitlines()[-1])


def tokens(ft, node, family, tokenizer, work, texts=None):
    from tokenizers import Tokenizer
    theirs = Tokenizer.from_file(os.path.join(tokenizer, "tokenizer.json"))
    texts = texts or TEXTS
    sizes = {**COMMON, **FAMILIES[family], "vocab_size": theirs.get_vocab_size(), "hidden_size": 32, "intermediate_size": 32}
    sizes.update({k: sizes["vocab_size"] for k in ("vocab_size_per_layer_input",) if k in sizes})
    config = CONFIG_MAPPING[family](**sizes)
    folder = tempfile.mkdtemp(prefix=family, dir=work)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for f in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(tokenizer, f), folder)
    out = folder + ".gguf.d"
    subprocess.run([ft, "export", folder, "--to", "gguf", "--out", out], check=True, stdout=subprocess.DEVNULL)
    got = run(node, "llama_tokens.mjs", os.path.join(out, "model.gguf"), json.dumps(texts))
    want = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    wrong = [f"{t!r}: {g} for {w}" for t, g, w in zip(texts, got, want) if g != w]
    return f"tokens of {len(texts)} texts" + ("" if not wrong else "  OVER " + "; ".join(wrong))


def main():
    ft, node = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        for family in [f for f in sys.argv[3:] or FAMILIES if f != "tokenizers"]:
            for adapted in (False, True) if family in ADAPTED else (False,):
                said = check(ft, node, family, work, adapted)
                failed += "OVER" in said or "llama.cpp:" in said
                print(f"{family}{' with an adapter' * adapted}: {said}", flush=True)
        if "tokenizers" in (sys.argv[3:] or ["tokenizers"]):
            import published
            for name, family, folder, texts in published.tokenizers(os.path.join(work, "published")):
                said = tokens(ft, node, family, folder, work, texts)
                failed += "OVER" in said
                print(f"{name}: {said}", flush=True)
        for pair in filter(None, os.environ.get("PEERS_TOKENIZERS", "").split(":")):
            family, tokenizer = pair.split("=")
            said = tokens(ft, node, family, tokenizer, work)
            failed += "OVER" in said
            print(f"{family}: {said}", flush=True)
    sys.exit(1 if failed else 0)


main()
