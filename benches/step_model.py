#!/usr/bin/env python3
"""Tokens a second on paper: the time of a training step from machine code, data sheets and arithmetic, with the shares of
their bounds that kernels reached on an H200 and an H100 (2026-11-27, docs/lab/gpu.md). Other cards are estimates.

    python3 benches/step_model.py             a table for the cards and workloads below
    python3 benches/step_model.py --parts     the milliseconds of each part, on H100
    python3 benches/step_model.py --check     exit code 1 if a figure is below FLOORS (.ci/run)

Loops of attention and of grouped products come from tests/cuda/loops.txt: the most of cycles for tensor cores, issue
slots and shared memory, over the share that kernels reach of such a bound. All other parts are bytes over the rate of a
large copy, or products over the rate of cuBLAS.
"""
import os
import sys

LOOPS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "cuda", "loops.txt")

# Column of loops.txt, multiprocessors, GHz under load, TFLOP/s that cuBLAS reaches, TB/s of elementwise kernels. Those of
# H200 and H100 give a step of a whole model as measured, whose clocks are 7% below those of single kernels; the others
# are published.
CARDS = {
    "H100": (3, 132, 1.70, 730, 2.5),
    "H200": (3, 132, 1.65, 715, 3.1),
    "A100-80": (0, 108, 1.35, 240, 1.7),
    "A6000": (1, 84, 1.6, 115, 0.64),
    "L40S": (2, 142, 2.2, 195, 0.72),
}
# Shares that kernels reach of the bound of their loop, on H200 at 4,096 tokens, 32 heads of 128; grouped products of 128
# experts with tiles of 128 rows that are not full; of values on H100.
SHARES = {"attention_forward": 0.50, "attention_backward_q": 0.59, "attention_backward_kv": 0.59, "grouped_coded_forward": 0.38,
          "grouped_coded_backward": 0.36, "grouped": 0.48}
# Skinny products (LoRA factors) reach this share of the memory rate, those of experts the second, gradients of experts'
# factors the third. A decoded value costs the time of so many bytes. A launch costs this many seconds of gaps. A router's
# products, in TF32 and with their casts, take the time of so many FLOPs in f32 without tensor cores.
SKINNY, SKINNY_GROUPED, GRADIENTS, DECODED, GAP, ROUTER = 0.70, 1.05, 0.75, 2.6, 2e-6, 0.52
TOKENS, RANK = 4096, 16
# Issue slots of a thread for each value of adamw8bit, by its time on an H200 (7.2 ps).
ADAM = 213

# Layers, width, queries, keys, feed-forward, vocabulary, experts of a token (0: dense) of EXPERTS.
EXPERTS = 128
MODELS = {
    "Qwen3-8B": (36, 4096, 4096, 1024, 12288, 151936, 0),
    "Llama-3-8B": (32, 4096, 4096, 1024, 14336, 128256, 0),
    "Qwen3-30B-A3B": (48, 2048, 4096, 512, 768, 151936, 8),
}
# Name, model, what trains ("lora", "full"), base in 4 bits, whether all is recomputed.
WORKLOADS = [
    ("Qwen3-8B QLoRA, all recomputed", "Qwen3-8B", "lora", True, True),
    ("Qwen3-8B QLoRA, nothing recomputed", "Qwen3-8B", "lora", True, False),
    ("Llama-3-8B LoRA in bf16, nothing recomputed", "Llama-3-8B", "lora", False, False),
    ("Qwen3-30B-A3B, 4-bit experts, LoRA", "Qwen3-30B-A3B", "lora", True, True),
    ("Qwen3-8B in full, adamw8bit in backward", "Qwen3-8B", "full", False, True),
]
# Tokens a second on H100: aims, and figures that no change may lower.
BARS = {0: 9500, 1: 12000, 3: 9000, 4: 7000}
# Card, workload, layers, and tokens a second that it reached on 2026-11-27.
MEASURED = [("H200", 0, 36, 10427), ("H200", 0, 12, 28642), ("H200", 1, 12, 37102), ("H200", 4, 6, 35612),
            ("H100", 0, 36, 10235), ("H100", 1, 36, 13442), ("H100", 3, 48, 9489), ("H100", 3, 6, 62668), ("H100", 4, 36, 7856)]
FLOORS = {0: 10200, 1: 13400, 2: 14500, 3: 9100, 4: 7600}


def loops():
    """Cycles of a warp for a tensor-core instruction, by kernel and column."""
    found = {}
    for line in open(LOOPS):
        if not line.startswith("#"):
            name, *cards = line.split()
            split = [card.replace(":", "/").split("/") for card in cards]
            found[name] = [float(c[3].split("-")[0]) / float(c[1]) for c in split]
    return found


class Card:
    def __init__(self, name):
        self.column, self.sms, ghz, products, stream = CARDS[name]
        self.clock, self.products, self.stream = ghz * 1e9, products * 1e12, stream * 1e12
        self.cycles = loops()

    def tensor(self, kernel, flops):
        """Seconds of a kernel: 4,096 FLOPs for an instruction, on four quarters of each multiprocessor."""
        each = self.cycles[kernel][self.column]
        share = next(share for name, share in SHARES.items() if kernel.startswith(name))
        return flops / (self.sms * 4 * self.clock * 4096 / each * share)

    def pair(self, kernel):
        """The variant for much shared memory, where the card runs it."""
        wide = kernel.replace("_bf16", "_pair_bf16")
        return wide if self.column in (0, 3) and wide in self.cycles else kernel


def partial_sums(o):
    """Bytes of the sums that factors.cu writes for a linear of `o` outputs: 10 MB at most, read again from L2."""
    slabs, tiles = -(-o // 512), -(-TOKENS // 128)
    blocks = -(-tiles // -(-tiles // max(132 // slabs, 1)))
    return 4 * RANK * (slabs * TOKENS + blocks * o)


def step(card, model, trains, coded, recomputed, some=None):
    """Seconds of each part of a step of all layers or some."""
    layers, d, q, kv, f, vocab, top = MODELS[model]
    layers = some or layers
    dense_f = 0 if top else f
    again = 1 if recomputed else 0
    tokens = TOKENS * layers
    linears = [(d, q), (d, kv), (d, kv), (q, d)] + ([] if top else [(d, f), (d, f), (f, d)])
    weights = sum(i * o for i, o in linears)
    out = {}
    # the recomputed forward pass ends before the last product
    last = 0 if top else f * d
    passes = 1 + again * (1 - last / weights) + (2 if trains == "full" else 1)
    out["products"] = 2 * weights * passes * tokens / card.products
    scores = 2 * TOKENS * TOKENS * q * layers  # of a forward pass: two products of half a square
    forward = card.tensor(card.pair("attention_forward_bf16_128"), scores * (1 + again))
    dq = card.tensor(card.pair("attention_backward_q_bf16_128"), scores * 1.5)
    dkv = card.tensor(card.pair("attention_backward_kv_bf16_128"), scores * 2)
    out["attention"] = forward + dq + dkv
    qk = q + kv
    values = (8 + 6 * again + 8) * d + (2 + 2 * again + 3) * qk + (3 + 3 * again + 6) * dense_f
    if top:
        # rows gathered, activated, added up; again without the sum; backward both and gradients of the activation
        values += (2 + 2 * top) * d + 3 * top * f + again * ((1 + top) * d + 3 * top * f) + (2 + 2 * top) * d + 8 * top * f
    out["elementwise"] = 2 * values * tokens / card.stream
    head = 3 if trains == "full" else 2
    out["head"] = head * 2 * d * vocab * TOKENS / card.products + 12 * vocab * TOKENS / card.stream
    if coded:
        out["decoding"] = passes * weights * layers * DECODED / card.stream
    if trains == "lora":
        # dy is read once for du and dB
        values = sum((1 + again) * i for i, _ in linears) + sum(i + o for i, o in linears) - again * (last and f)
        # q, k, v and gate, up read their input once: in each forward pass, and of a 4-bit base for the gradients of A
        values -= (2 + (0 if top else 1)) * d * (1 + again + (1 if coded else 0))
        parts = sum(partial_sums(o) for _, o in linears) * layers
        out["adapters"] = 2 * values * tokens / (card.stream * SKINNY) + parts / card.stream
        if top:
            # gate and up read x together
            inputs, outputs = d + f, 2 * f + d
            low, gradients = (1 + again) * inputs + outputs, inputs + outputs
            each = low / SKINNY_GROUPED + gradients / GRADIENTS
            out["adapters"] += 2 * top * each * tokens / card.stream
    if top:
        flops = 2 * d * f * top * tokens
        # the recomputed forward pass ends before the last product
        kind = "grouped_coded" if coded else "grouped"
        across, back = flops * (3 + again * 2), flops * 3
        out["router"] = (3 + again) * 2 * d * EXPERTS * tokens / (card.sms * 256 * card.clock * ROUTER)
        out["experts"] = card.tensor(f"{kind}_forward_bf16", across) + card.tensor(f"{kind}_backward_bf16", back)
    if trains == "full":
        count = weights * layers + 2 * vocab * d
        # gradients: written, squared, read; 8-bit moments and 16-bit weights: read and written
        issue = count * ADAM / (card.sms * 128 * card.clock)
        out["optimizer"] = 8 * count / card.stream + max(12 * count / card.stream, issue)
    # launches of tests/gpu/counts.rs; experts add 25
    forward, backward = (27, 44 if coded else 47) if trains == "lora" else (30, 47)
    out["gaps"] = layers * (forward * (1 + again) + backward + (25 if top else 0)) * GAP
    return out


def main():
    bad = []
    rows = {n: [TOKENS / sum(step(Card(c), *w[1:]).values()) for c in CARDS] for n, w in enumerate(WORKLOADS)}
    print(f"tokens/s on paper, micro-batches of {TOKENS} tokens in one row, LoRA rank {RANK}")
    print(f"{'':46}" + "".join(f"{c:>9}" for c in CARDS) + f"{'bar':>9}")
    for n, rates in rows.items():
        bar = BARS.get(n)
        print(f"{WORKLOADS[n][0]:46}" + "".join(f"{r / 1000:8.1f}k" for r in rates) + (f"{bar / 1000:8.1f}k" if bar else ""))
        if rates[0] < FLOORS[n]:
            bad.append(f"{WORKLOADS[n][0]}: {rates[0]:.0f} tokens/s on H100 on paper, at least {FLOORS[n]} wanted")
    for card, n, layers, rate in MEASURED:
        model = TOKENS / sum(step(Card(card), *WORKLOADS[n][1:], layers).values())
        print(f"measured on {card}, {layers} layers: {WORKLOADS[n][0]}: {rate}, by this model {model:.0f}")
        if abs(model / rate - 1) > 0.05:
            bad.append("the model is more than 5% from a measured figure")
    if "--parts" in sys.argv:
        for name, *what in WORKLOADS:
            parts = step(Card("H100"), *what)
            print(f"{name}: " + ", ".join(f"{k} {1000 * v:.0f}" for k, v in parts.items()) + f" = {1000 * sum(parts.values()):.0f} ms")
    if "--check" in sys.argv and bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
