#!/usr/bin/env python3
"""Compares the engine's logits with those of transformers' LlamaForCausalLM on the same weights, both in 32-bit floats.

First `dump_logits` writes the engine's logits of some text; this script then runs the same tokens through transformers and
prints the largest absolute difference. It ends with an error if that is above the tolerance.

Needs the Python packages torch and transformers, a folder that convert.py wrote, and the two files of dump_logits.
"""

import argparse
import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=REPOSITORY / "build/models/smollm2-135m", help="folder that convert.py wrote")
    parser.add_argument("--logits", type=Path, default=REPOSITORY / "build/logits.f32", help="file that dump_logits wrote")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="largest absolute difference (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    import numpy
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    about = json.loads(Path(f"{options.logits}.json").read_text(encoding="utf-8"))
    context, count, vocabulary = about["context_tokens"], about["logits_tokens"], about["vocabulary"]
    ours = numpy.fromfile(options.logits, dtype=numpy.float32)
    if ours.size != count * vocabulary:
        print(f"error: {options.logits} has {ours.size} numbers, expected {count} x {vocabulary}", file=sys.stderr)
        return 1
    ours = torch.from_numpy(ours.reshape(count, vocabulary))

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    model.eval()
    with torch.no_grad():
        tokens = torch.tensor([about["tokens"]])
        theirs = model(tokens, logits_to_keep=count, use_cache=False).logits[0]
    difference = (ours - theirs).abs()
    agree = (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {model.config.architectures[0]}")
    print(f"{context} tokens of context, logits of {count} tokens over a vocabulary of {vocabulary}")
    print(f"largest logit {theirs.abs().max():.2f}, largest absolute difference {difference.max():.2e}, mean {difference.mean():.2e}")
    print(f"same likeliest token: {agree} of {count}")
    if difference.max() > options.tolerance:
        print(f"error: the largest difference is above {options.tolerance}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
