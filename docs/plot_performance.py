#!/usr/bin/env python3
"""Draws docs/images/performance-*.svg from benchmark results, or prints them against the goals.

  docs/plot_performance.py [--results DIRECTORY] [--images DIRECTORY]     needs matplotlib
  docs/plot_performance.py --goals [--results DIRECTORY]                  a table in Markdown; needs nothing

The directory holds recall.json, interference.json, select.json, attention.json and decode.json, as
`scripts/bench <which> --json FILE` writes them. What they lack is looked for in the files of PARTS.
"""
import argparse
import json
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
PARTS = {"recall": ["recall", "moves", "pinning"], "interference": ["interference", "interference-paused"],
         "select": ["select", "chain"], "attention": ["attention"], "decode": ["decode"]}


def load(directory, which):
    """Counters by benchmark name, without what Google Benchmark appends to it."""
    runs = {}
    for part in PARTS[which]:
        path = directory / f"{part}.json"
        if path.exists():
            for run in json.loads(path.read_text())["benchmarks"]:
                runs.setdefault(re.sub(r"/iterations:.*", "", run["name"]), run)
    return runs


def value(runs, name, counter):
    return runs.get(name, {}).get(counter)


def recall(engine, fragment, volume):
    return f"transfer/recall/{engine}/fragment:{fragment}/volume:{volume}"


def size(count):
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB" if count >= 1024 else f"{count} B"


# Goals -----------------------------------------------------------------------------------------------------------------


def goals(directory):
    """(figure, goal, what was found, whether it is in the files and meets its goal)"""
    runs = {which: load(directory, which) for which in PARTS}
    rows = []

    def verdict(known, met):
        return "met" if met else "not met" if known else "not in these files"

    def add(figure, goal, found, bounds, digits=2, at_most=False):
        """bounds: one for each number found"""
        known = [number for number in found if number is not None]
        text = " / ".join("-" if number is None else f"{number:.{digits}f}" for number in found)
        met = len(known) == len(found) and all(
            (number <= bound if at_most else number >= bound) for number, bound in zip(found, bounds)
        )
        rows.append((figure, goal, text, verdict(len(known) == len(found), met)))

    link = lambda engine, fragment, volume: value(runs["recall"], recall(engine, fragment, volume), "link_ratio")
    volumes = (64 * MIB, 8 * MIB, MIB)
    planned = "gather_scatter_engine:8/planned/graph/rows:8"
    if recall(planned, 65536, MIB) not in runs["recall"]:
        planned = "gather_scatter_engine:8/planned/graph/rows_per_landing:0"
    add("recall of 64 KiB blocks, resolve included, 8 groups, 64 / 8 / 1 MiB", "0.90 / 0.86 / 0.68",
        [link(planned, 65536, volume) for volume in volumes], [0.90, 0.86, 0.68], 3)
    for groups in (6, 8):
        beside = f"transfer/interference/gather_blocks:{groups}/decode_gemm/fragment:65536"
        ratio = value(runs["interference"], beside, "link_ratio")
        slowdown = value(runs["interference"], beside, "slowdown")
        text = "-" if ratio is None else f"{ratio:.2f} / {slowdown:.2f}x"
        rows.append((f"beside a decode GEMM, {groups} groups: recall / slowdown", "0.86 / 1.15x", text,
                     verdict(ratio is not None, ratio is not None and ratio >= 0.86 and slowdown <= 1.15)))
    for fragment in (4096, 16384, 65536):
        add(f"gather alone, {size(fragment)}, 4 groups, 64 / 8 / 1 MiB", "0.90 / 0.88 / 0.80",
            [link("gather_blocks:4", fragment, volume) for volume in volumes], [0.90, 0.88, 0.80], 3)
    add("gather alone, 2 KiB, 8 groups, 64 / 8 / 1 MiB", "0.90 / 0.88 / 0.80",
        [link("gather_blocks:8", 2048, volume) for volume in volumes], [0.90, 0.88, 0.80], 3)
    small = (1024, 512, 256)
    add("1 KiB / 512 B / 256 B, ordered plan, 64 MiB", "0.89 / 0.86 / 0.72",
        [link("gather_blocks_ordered:4", fragment, 64 * MIB) for fragment in small], [0.89, 0.86, 0.72], 3)
    add("the same, the ordering on the device included", "shown",
        [link("order_entries+gather_blocks:4", fragment, 64 * MIB) for fragment in small], [0, 0, 0], 3)
    add("host-planned bulk, runs of 64 / 256 KiB, 64 MiB", "0.94 / 0.97",
        [link("move_async", fragment, 64 * MIB) for fragment in (65536, 262144)], [0.94, 0.97], 3)
    one = recall("gather_scatter_engine:8/planned/behind_work/rows:1", 65536, 65536)
    add("one 64 KiB block, resolve to data, us", "12", [value(runs["recall"], one, "microseconds")], [12], 1, True)
    ours = value(runs["recall"], recall("gather_blocks:8", 8192, 64 * MIB), "microseconds")
    for engine, bound in (("fragment_copy_engine", 15), ("batch_copy_engine", 5)):
        theirs = value(runs["recall"], recall(engine, 8192, 64 * MIB), "microseconds")
        add(f"over {engine}, 8 KiB fragments, 64 MiB", f"{bound}x",
            [theirs / ours if ours and theirs else None], [bound], 1)
    back = "transfer/write_back/move_async/run:{}/volume:{}"
    add("write-back of sealed blocks, runs of 64 / 256 KiB, 64 MiB", "0.94",
        [value(runs["recall"], back.format(run, 64 * MIB), "link_ratio") for run in (65536, 262144)], [0.94, 0.94], 3)
    add("select, 64 rows x 8,192 blocks, one scoring head, share of a copy", "0.75",
        [value(runs["select"], "select/score+share+vote+top_k/rows:64/blocks:8192/scoring_heads:1", "copy_share")], [0.75])
    for rows_ in (1, 8):
        name = f"select/resolved/{{}}graph/rows:{rows_}/blocks:4096/scoring_heads:1"
        add(f"select and resolve in a graph behind other work, {rows_} rows x 4,096 blocks, us", "20",
            [value(runs["select"], name.format("behind_work/"), "microseconds")], [20], 1, True)
    add("paged attention, 64 rows x 2,048 tokens, share of a copy", "0.80",
        [next((run["copy_share"] for name, run in runs["attention"].items()
               if "rows:64" in name and "tokens:2048" in name and "copy_share" in run), None)], [0.80])

    def rate(name, counter="tokens_per_second"):
        return value(runs["decode"], f"decode/llama_8b/{name}/tokens:32768", counter)

    ours = [rate(f"offloaded/{how}/correlation:0.95/rows:24") for how in ("lockstep", "interruptible", "lockstep_graph")]
    ours = max((found for found in ours if found), default=None)
    for figure, theirs, bound in (
        ("tokens/s, 24 rows of 32,768 tokens offloaded over the 4 that fit resident", "dense_resident/graph/rows:4", 5.5),
        ("the same over 24 rows by head, waiting for copies of fragments",
         "offloaded/by_head_fragment_copies/correlation:0.95/rows:24", 3.0),
    ):
        add(figure, f"{bound}x", [ours / rate(theirs) if ours and rate(theirs) else None], [bound], 1)
    dense, managed = rate("dense_resident/graph/rows:4"), rate("dense_managed/lockstep/rows:4")
    add("light load: resident rows through a manager, of the tokens/s without", "0.99",
        [managed / dense if dense and managed else None], [0.99])
    return rows


# Plots -----------------------------------------------------------------------------------------------------------------


def draw(directory, images):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "pulseinfer", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    import matplotlib.pyplot as plot

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(images / f"performance-{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        plot.close(figure)

    runs = load(directory, "recall")
    fragments = [256 << i for i in range(11)]
    figure, panels = plot.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for panel, volume in zip(panels, (MIB, 8 * MIB, 64 * MIB)):
        for engine, label, style in (
            ("gather_blocks:4", "gather, 4 groups", "C0o-"),
            ("gather_blocks:8", "gather, 8 groups", "C0s:"),
            ("order_entries+gather_blocks:4", "put in order and gathered", "C2o-"),
            ("move_async", "copy engine, planned on the host", "C1o-"),
            ("batch_copy_engine", "batch_copy_engine", "C3x--"),
            ("fragment_copy_engine", "fragment_copy_engine", "C4x--"),
        ):
            points = [(f, value(runs, recall(engine, f, volume), "link_ratio")) for f in fragments]
            points = [(f, ratio) for f, ratio in points if ratio is not None]
            if points:
                panel.plot(*zip(*points), style, label=label, markersize=3.5, linewidth=1)
        panel.axhline(0.93, color="0.5", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(fragments[::2], [size(f).replace(" KiB", "K").replace(" B", "") for f in fragments[::2]])
        panel.set_title(f"{size(volume)} in all")
        panel.set_xlabel("bytes of a block")
    panels[0].set_ylabel("of one contiguous copy")
    panels[0].set_ylim(0, 1.02)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="upper center", ncols=6, bbox_to_anchor=(0.5, 0))
    save(figure, "recall")

    runs = load(directory, "interference")
    figure, panel = plot.subplots(figsize=(6, 3.6))
    for kind, label, colour in (
        ("decode_gemm", "64 x 28,672 x 8,192", "C0"),
        ("decode_gemm_by_rows", "the same, weights by rows", "C2"),
    ):
        for groups in (4, 6, 8, 12):
            run = runs.get(f"transfer/interference/gather_blocks:{groups}/{kind}/fragment:65536")
            if run:
                panel.plot(run["slowdown"], run["link_ratio"], colour + "o", label=label)
                panel.annotate(str(groups), (run["slowdown"], run["link_ratio"]), xytext=(4, 3), textcoords="offset points")
                label = None
    for name, run in sorted(runs.items()):
        paused = re.search(r"paused_us:(\d+)", name)
        if paused:
            panel.plot(run["slowdown"], run["link_ratio"], "C3x")
            panel.annotate(f"8, {paused[1]} us apart", (run["slowdown"], run["link_ratio"]), xytext=(4, 3),
                           textcoords="offset points", fontsize=7)
    panel.set_xlabel("the product takes so many times its time alone")
    panel.set_ylabel("recall, of one contiguous copy")
    panel.legend(fontsize=7, loc="lower right")
    save(figure, "interference")

    runs = load(directory, "select")
    figure, panel = plot.subplots(figsize=(6, 3.6))
    forms = (("five_launches/behind_work/graph", "five launches"), ("behind_work/graph", "three launches"))
    for offset, (form, label) in enumerate(forms):
        times = [value(runs, f"select/resolved/{form}/rows:{rows}/blocks:4096/scoring_heads:1", "microseconds")
                 for rows in (1, 8)]
        bars = [(i + 0.4 * offset - 0.2, time) for i, time in enumerate(times) if time is not None]
        if bars:
            panel.bar(*zip(*bars), 0.38, label=label)
            panel.legend(fontsize=7)
    panel.axhline(20, color="0.5", linewidth=0.8, linestyle="--")
    panel.set_xticks((0, 1), ("1 row", "8 rows"))
    panel.set_xlabel("selection of 4,096 blocks and its resolve, in a graph")
    panel.set_ylabel("us")
    save(figure, "select")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=HERE.parent / "benchmarks" / "results" / "h200")
    parser.add_argument("--images", type=pathlib.Path, default=HERE / "images")
    parser.add_argument("--goals", action="store_true")
    options = parser.parse_args()
    if not options.results.is_dir():
        parser.error(f"{options.results} is no directory")
    if options.goals:
        print("| figure | goal | found | |\n|---|---|---|---|")
        for figure, goal, found, met in goals(options.results):
            print(f"| {figure} | {goal} | {found} | {met} |")
    else:
        draw(options.results, options.images)


if __name__ == "__main__":
    main()
