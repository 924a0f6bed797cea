#!/usr/bin/env python3
"""Fetches real texts and cuts them into the documents of the accuracy benchmark: token ids, and where the scored part begins.

Nothing of the texts is kept in the repository. The sources, all in the public domain or under a free licence:
  novel, copy   the six novels of Jane Austen, from Debian's package r-cran-janeaustenr (public domain)
  code          Python sources of docutils (public domain), networkx and sympy (BSD-3-Clause), from PyPI
  manual        the manuals of docutils (public domain), from PyPI

The last 512 tokens of each document are scored:
  novel    the next part of the chapter: names and events of the pages before
  code     the next part of a module: names and idioms defined above
  manual   the next part of a reference text: terms and forms of its earlier sections
  copy     a passage that stood at the begin, word for word, after thousands of tokens of another novel

Usage: documents.py --model FOLDER --output FILE [--demo CONTEXT]
The model's tokenizer.json (convert.py of examples/decode_text writes it) makes the ids.
"""

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

SCORED = 512
NOVELS = ["sensesensibility", "prideprejudice", "mansfieldpark", "emma", "northangerabbey", "persuasion"]
DEBIAN_PACKAGE = "r-cran-janeaustenr"
PYPI = {"docutils": "0.21.2", "networkx": "3.4.2", "sympy": "1.13.3"}
CODE = [
    ("docutils", "docutils/parsers/rst/states.py"),
    ("docutils", "docutils/writers/latex2e/__init__.py"),
    ("docutils", "docutils/nodes.py"),
    ("networkx", "networkx/classes/graph.py"),
    ("networkx", "networkx/algorithms/isomorphism/isomorphvf2.py"),
    ("networkx", "networkx/drawing/nx_pylab.py"),
    ("sympy", "sympy/matrices/dense.py"),
    ("sympy", "sympy/geometry/polygon.py"),
]
MANUALS = [
    "docs/ref/rst/directives.txt",
    "docs/ref/rst/restructuredtext.txt",
    "docs/user/config.txt",
    "docs/ref/doctree.txt",
]


class source_error(Exception):
    """A text that cannot be had; the message says what to do."""


def run(command, folder):
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as problem:
        raise source_error(f"{command[0]} is not installed; the texts come from Debian and PyPI packages") from problem
    if done.returncode != 0:
        raise source_error(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr).strip()[-1000:]}")


def character_vector(data):
    """The first character vector of an R object in its XDR form: a list of lines."""
    start = data.find(b"\x00\x00\x00\x10")  # its type
    if start < 0:
        return []
    (count,) = struct.unpack_from(">i", data, start + 4)
    lines, at = [], start + 8
    for _ in range(count):
        if at + 8 > len(data):
            return []
        kind, length = struct.unpack_from(">Ii", data, at)
        if kind & 0xFF != 9 or length < -1:
            return []
        length = max(length, 0)
        lines.append(data[at + 8 : at + 8 + length].decode("utf-8", "replace"))
        at += 8 + length
    return lines


def read_novels(cache):
    """{name: text} of the lazy-load database in which R packages keep their data."""
    folder = cache / DEBIAN_PACKAGE
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            run(["apt-get", "download", DEBIAN_PACKAGE], temporary)
            package = next(Path(temporary).glob("*.deb"))
            run(["dpkg", "-x", package.name, "unpacked"], temporary)
            (Path(temporary) / "unpacked").rename(folder)
    data = next(folder.rglob("data/Rdata.rdb")).read_bytes()
    novels, at = {}, 0
    titles = {
        "sensesensibility": "SENSE AND SENSIBILITY",
        "prideprejudice": "PRIDE AND PREJUDICE",
        "mansfieldpark": "MANSFIELD PARK",
        "emma": "EMMA",
        "northangerabbey": "NORTHANGER ABBEY",
        "persuasion": "PERSUASION",
    }
    while at + 5 < len(data):
        # Each object: its length, then a zlib stream.
        decoder = zlib.decompressobj()
        content = decoder.decompress(data[at + 4 :])
        at = len(data) - len(decoder.unused_data)
        lines = character_vector(content)
        title = lines[0].strip().upper() if lines else ""
        for name, wanted in titles.items():
            if title == wanted and len(lines) > 1_000:
                novels[name] = "\n".join(lines)
    missing = [name for name in NOVELS if name not in novels]
    if missing:
        raise source_error(f"{DEBIAN_PACKAGE} lacks {', '.join(missing)}")
    return novels


def read_package(cache, name):
    """Folder of a source distribution from PyPI."""
    folder = cache / f"{name}-{PYPI[name]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            # The manuals are in the source distribution only.
            form = "--no-binary=:all:" if name == "docutils" else "--only-binary=:all:"
            run(
                [sys.executable, "-m", "pip", "download", "--no-deps", form, "--disable-pip-version-check",
                 f"{name}=={PYPI[name]}"],
                temporary,
            )
            archive = next(file for file in Path(temporary).iterdir() if file.suffix in (".gz", ".whl"))
            unpacked = Path(temporary) / "unpacked"
            unpacked.mkdir()
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as file:
                    file.extractall(unpacked)
                unpacked.rename(folder)
            else:
                with tarfile.open(archive) as file:
                    file.extractall(unpacked, filter="data")
                next(unpacked.iterdir()).rename(folder)
    return folder


def make_documents(cache, encode):
    """[(name, kind, source, tokens)]. Lengths rise from 6,000 to 7,500 tokens, so that no block edge is special."""
    novels = read_novels(cache)
    chapters = {}
    for name, text in novels.items():
        starts = [match.start() for match in re.finditer(r"(?m)^chapter\b", text, re.IGNORECASE)]
        chapters[name] = text[starts[0] :] if starts else text
    length = iter(range(10_000))

    def next_length():
        return 6_000 + next(length) * 661 % 1_501

    documents = []
    austen = f"{DEBIAN_PACKAGE}, public domain"
    for part in range(2):
        for name in NOVELS:
            text = chapters[name]
            ids = encode(text[(1 + 4 * part) * len(text) // 10 :][:60_000])
            documents.append((f"{name}-{part + 1}", "novel", austen, ids[: next_length()]))
    for package, path in CODE:
        ids = encode((read_package(cache, package) / path).read_text(encoding="utf-8")[:60_000])
        documents.append((path.replace("/", "."), "code", f"{package} {PYPI[package]}", ids[: next_length()]))
    for path in MANUALS:
        ids = encode((read_package(cache, "docutils") / path).read_text(encoding="utf-8")[:60_000])
        documents.append((path.replace("/", "."), "manual", f"docutils {PYPI['docutils']}, public domain", ids[: next_length()]))
    for index in range(8):
        first, second = NOVELS[index % 6], NOVELS[(index + 1 + index // 6) % 6]
        total, lead = next_length(), 64
        passage = encode(chapters[first][(index + 1) * len(chapters[first]) // 12 :][:8_000])[: lead + SCORED]
        before = encode(chapters[first][(index + 1) * len(chapters[first]) // 12 - 3_000 :][:3_000])[:200]
        gap_length = total - len(before) - 2 * len(passage)
        gap = encode(chapters[second][(index + 2) * len(chapters[second]) // 12 :][:60_000])[:gap_length]
        documents.append((f"copy-{first}-{second}", "copy", austen, before + passage + gap + passage))
    for name, _, _, ids in documents:
        if not 6_000 <= len(ids) <= 7_500:
            raise source_error(f"document {name} has {len(ids)} tokens, wanted are 6000 to 7500")
    # Kinds take turns, so that any first N documents are of all kinds.
    kinds = ["novel", "code", "copy", "manual"]
    queues = {kind: [document for document in documents if document[1] == kind] for kind in kinds}
    ordered = []
    while any(queues.values()):
        kind = max(kinds, key=lambda k: (len(queues[k]) / sum(d[1] == k for d in documents), -kinds.index(k)))
        ordered.append(queues[kind].pop(0))
    return ordered


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--demo", type=int, metavar="CONTEXT", help="the demo's text alone, with so many tokens before the scored ones")
    parser.add_argument("--cache", type=Path, default=Path("build/accuracy/texts"), help="where fetched packages lie (default: %(default)s)")
    options = parser.parse_args()
    try:
        from tokenizers import Tokenizer

        path = options.model / "tokenizer.json"
        if not path.is_file():
            raise source_error(f"{path} is not there; examples/decode_text/convert.py writes it")
        tokenizer = Tokenizer.from_file(str(path))
        options.cache.mkdir(parents=True, exist_ok=True)
        if options.demo:
            text = json.loads((options.model / "text.json").read_text(encoding="utf-8"))
            begin = text["continuation"]
            ids = text["tokens"][begin - options.demo : begin + SCORED]
            documents = [("demo", "novel", text["source"], ids)]
        else:
            documents = make_documents(options.cache, lambda text: tokenizer.encode(text).ids)
    except (source_error, ImportError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    result = {"format": 1, "tokenizer_sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "documents": []}
    for name, kind, source, ids in documents:
        result["documents"].append(
            {"name": name, "kind": kind, "source": source, "scored": SCORED,
             "sha256": hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest(), "tokens": ids}
        )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    lengths = [len(ids) for _, _, _, ids in documents]
    print(f"{options.output}: {len(documents)} documents of {min(lengths)} to {max(lengths)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
