#!/usr/bin/env python3
"""Draws the losses of a run as an SVG: docs/loss_curve.py RUN/metrics.jsonl docs/quickstart.svg"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 56, 16, 40, 44


def main(source, target):
    events = [json.loads(line) for line in open(source, encoding="utf-8")]
    train = [(e["step"], e["loss"]) for e in events if e["event"] == "step"]
    evals = [(e["step"], e["loss"]) for e in events if e["event"] == "eval"]
    if not train or not evals:
        sys.exit(f"{source} has no steps or no evaluations")
    last = max(s for s, _ in train)
    losses = [l for _, l in train + evals]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(loss)) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13" role="img">',
        "<title>Training and evaluation loss of the quickstart</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for power in range(low, high + 1):
        out.append(f'<path d="M{LEFT} {y(10**power):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(10**power) + 4:.1f}" text-anchor="end" fill="#444444">{10**power:g}</text>')
    for step in range(0, last + 1, max(1, last // 5)):
        out.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#444444">{step}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#444444">step</text>')
    line = " ".join(f"{x(s):.1f},{y(l):.1f}" for s, l in train)
    out.append(f'<polyline points="{line}" fill="none" stroke="#7aa6d8" stroke-width="1.5"/>')
    line = " ".join(f"{x(s):.1f},{y(l):.1f}" for s, l in evals)
    out.append(f'<polyline points="{line}" fill="none" stroke="#b3400f" stroke-width="2"/>')
    out += [f'<circle cx="{x(s):.1f}" cy="{y(l):.1f}" r="3.5" fill="#b3400f"/>' for s, l in evals]
    out.append(f'<text x="{LEFT}" y="22" fill="#222222">loss (log scale), ft run recipes/quickstart.toml:</text>')
    out.append('<text x="415" y="22" fill="#3f78b5">training</text>')
    out.append(f'<text x="485" y="22" fill="#b3400f">evaluation {evals[0][1]:.2f} to {evals[-1][1]:.2f}</text>')
    out.append("</svg>")
    open(target, "w", encoding="utf-8").write("\n".join(out) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
