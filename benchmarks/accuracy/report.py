#!/usr/bin/env python3
"""Prints the tables of docs/accuracy.md from the benchmark's JSON files, and draws its pictures.

Usage: report.py TABLE.json [--picture FILE.svg] [--closed-loop FILE.json --loop-picture FILE.svg]
Pictures need the Python package matplotlib.
"""

import argparse
import json
import math
import random
from pathlib import Path

KINDS = ["novel", "code", "manual", "copy"]


def bootstrap(values, draws=2000):
    """Mean and 95 % interval over documents; 0 of none."""
    if not values:
        return 0.0, 0.0, 0.0
    generator = random.Random(1)
    means = sorted(sum(generator.choice(values) for _ in values) / len(values) for _ in range(draws))
    return sum(values) / len(values), means[draws // 40], means[draws - 1 - draws // 40]


def percent(loss):
    return 100 * (math.exp(loss) - 1)


def label(row):
    layers = ", ".join(map(str, row["dense_layers"]))
    parts = [row["head_rule"] if row["head_groups"] == 1 else f"{row['head_rule']}, per KV head"]
    if row["head_rule"] == "soft_vote" and row["head_groups"] > 1:
        parts = ["group (soft vote of each KV head)"]
    if row["head_rule"] == "headwise":
        parts = ["headwise (each query head, union in the KV head)"]
    return parts[0], layers or "none"


def digest_name(row):
    if row["scores"] == "oracle":
        return "oracle"
    tokens = row.get("digest_tokens", row["block_tokens"])
    return row["digest"] + (f" of {tokens} tokens" if tokens != row["block_tokens"] and "split" not in row["digest"] else "")


def only(values, kinds, copied):
    """Those of copied passages, or of natural text: a row has its first documents."""
    return [value for value, kind in zip(values, kinds) if (kind == "copy") == copied]


def estimates(row):
    """Parts of heads, of layers and of steps within twice of the truth, by each estimate."""
    return "; ".join(f"{name} " + " ".join(f"{of[unit]:.3f}" for unit in ("heads", "layers", "steps") if of[unit] is not None)
                     for name, of in row["estimates_within_twice"].items())


def print_rows(title, rows, kinds, reference=None):
    """Perplexity and KL of natural text and of copied passages apart; attention's figures of all texts."""
    print(f"\n**{title}**\n")
    head = ["rule", "digest", "bytes", "dense layers", "k", "blocks", "texts", "perplexity", "KL", "copied: KL", "top-1", "mass", "p1",
            "worst head", "output error", "kB/step", "of the selection", "lever"]
    if reference is not None:
        head += ["mass, points", "perplexity, points", "KL", "recalled"]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        of = row["of_documents"]
        loss = bootstrap(only(of["loss_change"], kinds, False))
        kl = bootstrap(only(of["kl_mean"], kinds, False))
        copied = only(of["kl_mean"], kinds, True)
        lever = [f"{key} {row[key]}" for key, usual in (("deferred_share", 0.0), ("hysteresis", 0.25), ("block_tokens", 16)) if row[key] != usual]
        if row["recent_tokens"] != max(128, row["budget_tokens"] // 8):
            lever.append(f"recent {row['recent_tokens']}")
        if row["deferred_share"] > 0:
            lever.append(f"deferred {row['deferred_of_recalled']:.2f}, estimates within twice " + estimates(row))
        cells = [
            label(row)[0], digest_name(row), str(row.get("digest_bytes", "")), label(row)[1], str(row["budget_tokens"]), f"{row['budget_blocks']:.1f}",
            str(row["documents"]), f"{percent(loss[0]):+.2f} % ({percent(loss[1]):.2f} to {percent(loss[2]):.2f})",
            f"{kl[0]:.4f} ({kl[1]:.4f} to {kl[2]:.4f})", f"{sum(copied) / max(1, len(copied)):.3f}",
            f"{row['top1_agreement']:.1f} %", f"{row['mass_mean']:.4f}", f"{row['mass_p1']:.2f}", f"{row['mass_worst_head']:.2f}",
            f"{row['output_error_mean']:.3f}", f"{row['recalled_bytes_per_step'] / 1e3:.0f}",
            f"{100 * row['recalled_of_selection']:.1f} %", ", ".join(lever),
        ]
        if reference is not None and row is not reference:
            theirs = reference["of_documents"]
            mass = bootstrap([100 * (x - y) for x, y in zip(of["mass_mean"], theirs["mass_mean"])])
            change = bootstrap(only([x - y for x, y in zip(of["loss_change"], theirs["loss_change"])], kinds, False))
            more = bootstrap(only([x - y for x, y in zip(of["kl_mean"], theirs["kl_mean"])], kinds, False))
            pairs = list(zip(of["recalled_bytes"], theirs["recalled_bytes"]))
            recalled = 100 * (sum(x for x, _ in pairs) / max(1, sum(y for _, y in pairs)) - 1)
            cells += [f"{mass[0]:+.2f} ({mass[1]:+.2f} to {mass[2]:+.2f})",
                      f"{percent(change[0]):+.2f} ({percent(change[1]):+.2f} to {percent(change[2]):+.2f})",
                      f"{more[0]:+.4f} ({more[1]:+.4f} to {more[2]:+.4f})", f"{recalled:+.1f} %"]
        elif reference is not None:
            cells += [""] * 4
        print("| " + " | ".join(cells) + " |")


def print_table(table):
    rows = table["rows"]
    kinds = [each["kind"] for each in table["context"]["documents"]]
    sets = {}
    for row in rows:
        if row["comparison"] == "rules":
            sets.setdefault((row["scores"], row["budget_tokens"], tuple(row["dense_layers"])), []).append(row)
    for (scores, budget, layers), members in sets.items():
        print_rows(f"Head rules, {scores} scores, k = {budget}, dense layers {list(layers) or 'none'}", members, kinds, members[0])
    # Soft vote of all heads by the digests that the examples take.
    first = next((members[0] for (scores, _, _), members in sets.items() if scores == "digest"), None)
    for name in ("digests", "budgets", "levers", "row"):
        members = [row for row in rows if row["comparison"] == name]
        if members:
            print_rows(name.capitalize(), ([first] if first else []) + members, kinds, first)


def style(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_rules(table, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "accuracy", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    rows = [row for row in table["rows"] if row["comparison"] == "rules" and row["budget_tokens"] == 1024]
    sets = list(dict.fromkeys((row["scores"], tuple(row["dense_layers"])) for row in rows))
    figure, axes = plt.subplots(1, len(sets), figsize=(4 * len(sets), 3.6), sharey=True, squeeze=False)
    axes = axes[0]
    titles = [("digests" if scores == "digest" else "true mass") +
              (f", layers {', '.join(map(str, layers))} dense" if layers else ", every layer sparse") for scores, layers in sets]
    colours = dict(zip(KINDS, ["#3b6ea5", "#c7782b", "#6a994e", "#8d4a8d"]))
    for axis, (scores, layers), title in zip(axes, sets, titles):
        members = [row for row in rows if row["scores"] == scores and tuple(row["dense_layers"]) == layers]
        names = {"group (soft vote of each KV head)": "group", "headwise (each query head, union in the KV head)": "headwise",
                 "designated_head or fallback": "designated,\nfallback", "designated_head": "designated", "few_heads": "few heads",
                 "max_share": "max share", "soft_vote": "soft vote"}
        for place, row in enumerate(members):
            for offset, kind in enumerate(KINDS):
                if kind not in row["of_kinds"]:
                    continue
                of = row["of_kinds"][kind]
                low, high = of["kl_mean_ci"]
                axis.errorbar(place + 0.18 * (offset - 1.5), of["kl_mean"], yerr=[[of["kl_mean"] - low], [high - of["kl_mean"]]],
                              fmt="o", markersize=4, linewidth=1, color=colours[kind], label=kind if place == 0 else None)
        axis.set_xticks(range(len(members)), [names[label(row)[0]] for row in members], fontsize=7, rotation=35, ha="right")
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        style(axis)
    axes[0].set_ylabel("KL to the dense model, nat")
    axes[0].legend(fontsize=7, frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_loop(loop, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "accuracy", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    pieces = loop["closed_loop"]["pieces"]
    figure, axis = plt.subplots(figsize=(6, 3))
    places = [piece["first_token"] + 128 for piece in pieces]
    axis.fill_between(places, [p["kl_mean_ci"][0] for p in pieces], [p["kl_mean_ci"][1] for p in pieces], color="#c9d8ea")
    axis.plot(places, [p["kl_mean"] for p in pieces], color="#3b6ea5", marker="o", markersize=3, label="mean of texts")
    axis.plot(places, [p["kl_median"] for p in pieces], color="#c7782b", marker="o", markersize=3, label="median of texts")
    axis.axhline(1.5 * pieces[0]["kl_mean"], color="#888888", linewidth=0.8, linestyle="--", label="1.5 of the first 256")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("generated tokens")
    axis.set_ylabel("KL, nat")
    axis.legend(fontsize=7, frameon=False)
    style(axis)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--closed-loop", type=Path)
    parser.add_argument("--loop-picture", type=Path)
    options = parser.parse_args()
    table = json.loads(options.table.read_text(encoding="utf-8"))
    print_table(table)
    if options.picture:
        draw_rules(table, options.picture)
    if options.closed_loop and options.loop_picture:
        draw_loop(json.loads(options.closed_loop.read_text(encoding="utf-8")), options.loop_picture)


if __name__ == "__main__":
    main()
