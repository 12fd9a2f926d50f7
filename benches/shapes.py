"""Model shapes of the benchmarks as Hugging Face configs; the number of layers can be reduced for smaller cards."""
import json, os

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6,
             attention_bias=False, max_position_embeddings=40960, torch_dtype="bfloat16")
SHAPES = {
    # 107 M parameters
    "q100m": dict(QWEN3, num_hidden_layers=12, hidden_size=768, intermediate_size=2304, num_attention_heads=12,
                  num_key_value_heads=4, head_dim=64, vocab_size=32000, tie_word_embeddings=True),
    # for dry runs: seconds on an emulated device
    "tiny": dict(QWEN3, num_hidden_layers=2, hidden_size=128, intermediate_size=192, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=64, vocab_size=256, tie_word_embeddings=False),
    "tiny-moe": dict(QWEN3, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=2, hidden_size=128,
                     intermediate_size=192, num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=256,
                     tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                     norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    "q0.6b": dict(QWEN3, num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                  num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True),
    "qwen3-8b": dict(QWEN3, num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
                     num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False),
    "llama-3-8b": dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
                       rope_theta=5e5, attention_bias=False, max_position_embeddings=8192, torch_dtype="bfloat16",
                       num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
    "mixtral-8x7b": dict(architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_act="silu", rms_norm_eps=1e-5,
                         rope_theta=1e6, max_position_embeddings=32768, torch_dtype="bfloat16", num_hidden_layers=32,
                         hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                         vocab_size=32000, tie_word_embeddings=False, num_local_experts=8, num_experts_per_tok=2,
                         router_aux_loss_coef=0.02),
    "qwen3-30b-a3b": dict(QWEN3, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=48,
                          hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                          vocab_size=151936, tie_word_embeddings=False, num_experts=128, num_experts_per_tok=8,
                          moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
}


def write(folder, shape, layers=None):
    """Writes a model folder for `model.source`, for use with `model.weights = "random"`."""
    os.makedirs(folder, exist_ok=True)
    config = dict(SHAPES[shape])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)


def is_moe(shape):
    return "num_experts_per_tok" in SHAPES[shape]
