#!/usr/bin/env python3
"""The gated delta rule of transformers (`torch_chunk_gated_delta_rule`) against `cargo bench --bench delta`, in turns.

    python benches/delta.py BENCH [ROUNDS]        BENCH: the program that `cargo bench --bench delta --no-run` names

Same shapes, float32, the same number of threads (RAYON_NUM_THREADS, 2 by default); gates and unit lengths are part of
both. Prints milliseconds and, above 1, how much faster ft is. Needs torch and transformers 5."""
import json, os, statistics, subprocess, sys, time

THREADS = int(os.environ.setdefault("RAYON_NUM_THREADS", "2"))
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule

torch.set_num_threads(THREADS)


def measure(shape, rounds):
    t, keys, values, k, v = shape
    leaf = lambda *s: torch.randn(*s, requires_grad=True)
    q, key, value = leaf(1, t, keys, k), leaf(1, t, keys, k), leaf(1, t, values, v)
    a, b, a_log, bias = leaf(1, t, values), leaf(1, t, values), leaf(values), leaf(values)
    d = torch.randn(1, t, values, v)
    forward, backward = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        g = -a_log.exp() * torch.nn.functional.softplus(a + bias)
        o, _ = rule(q, key, value, g=g, beta=b.sigmoid(), use_qk_l2norm_in_kernel=True)
        forward.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        o.backward(d)
        backward.append(1e3 * (time.perf_counter() - start))
    return statistics.median(forward[1:]), statistics.median(backward[1:])


def main():
    rounds = sys.argv[2] if len(sys.argv) > 2 else "7"
    ours = subprocess.run([sys.argv[1], "--bench", rounds], check=True, capture_output=True, text=True).stdout
    for line in map(json.loads, ours.splitlines()):
        forward, backward = measure(line["shape"], int(rounds))
        both = (forward + backward) / (line["forward"] + line["backward"])
        print(f"{line['shape']}: forward {line['forward']:.1f} against {forward:.1f} ms, backward {line['backward']:.1f} against "
              f"{backward:.1f} ms: {forward / line['forward']:.2f}, {backward / line['backward']:.2f}, together {both:.2f}")


main()
