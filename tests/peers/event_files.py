#!/usr/bin/env python3
"""TensorBoard's own reader on what a run writes.

    tests/peers/event_files.py RUN

RUN is the folder of a run with log.tensorboard = true. Needs the package tensorboard. Compares every scalar of its event files
with metrics.jsonl, and ends with 1 where they differ.
"""
import json, os, sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = sys.argv[1]
seen = EventAccumulator(os.path.join(run, "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
seen.Reload()
tags = seen.Tags()["scalars"]
wrong = 0
for tag in tags:
    group, key = tag.split("/")
    kind = {"train": "step", "speed": "step", "memory": "step", "eval": "eval", "experts": "experts"}[group]
    with open(os.path.join(run, "metrics.jsonl")) as lines:
        events = [e for e in map(json.loads, lines) if e["event"] == kind]
    if key == "perplexity":
        continue
    ours = [(e["step"], e[key]) for e in events if e.get(key) is not None]
    theirs = [(s.step, s.value) for s in seen.Scalars(tag)]
    same = len(ours) == len(theirs) and all(a == c and abs(b - d) <= 1e-6 * max(1, abs(b)) for (a, b), (c, d) in zip(ours, theirs))
    wrong += not same
    print(f"{tag:<28} {len(theirs):>5} values  {'same' if same else 'OTHER'}")
texts = seen.Tags()["tensors"]
print("texts:", texts, [t.tensor_proto.string_val[0].decode()[:60] for tag in texts for t in seen.Tensors(tag)])
sys.exit(1 if wrong or not tags else 0)
