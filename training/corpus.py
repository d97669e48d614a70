"""Builds the token corpus of the nano model from installed packages and permissive documents.

Owns gathering, filtering, removal of duplicates, the byte-level BPE and the transport form (xz'd
uint16). It must not know the model. Invariant: a held-out package or document (`families.HELD_OUT`)
never reaches a training token.

    python -m training.corpus gather --out WORK --packages DIR.. --documents DIR..
    python -m training.corpus tokenizer --out WORK
    python -m training.corpus tokens --out WORK --limit-bytes 60000000
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import json
import lzma
import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from training.families import HELD_OUT
from training.lists import words

SPECIAL_TOKENS: tuple[str, ...] = words(
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> "
    "<|observation|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> "
    "<|begin_of_audio|> <|end_of_audio|> <think> </think> <tool_call> </tool_call> "
    "<tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> "
    "<|image|> <|video|>"
)
VOCAB_SIZE = 8192
# Words, numbers digit by digit (recall of numbers wants that), punctuation runs, line breaks,
# blanks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_FILE_BYTES = 200_000
MIN_FILE_BYTES = 400
SEEN_LINE_SHARE = 0.4
SKIPPED_PARTS = re.compile(
    r"(^|/)(tests?|testing|_vendor|vendor|third_party|extern|externals|locale|migrations|node_modules|"
    r"search|genindex|_static|_modules|py-modindex|release|releases|changelog|whatsnew|news|"
    r"pt-br|fr|es|de|ja|ko|tr|zh-cn|da)(/|[-._]|$)",
    re.IGNORECASE,
)
TAG_BLOCK = re.compile(
    r"<(script|style|nav|head|footer|svg)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE
)
TAG_BREAK = re.compile(
    r"</?(p|div|br|li|tr|h[1-6]|pre|section|dt|dd|table|ul|ol)\b[^>]*>", re.IGNORECASE
)
TAG_ANY = re.compile(r"<[^>]*>")


@dataclass(slots=True)
class Seen:
    """Line and document fingerprints met so far; `fresh` also records what it lets pass."""

    lines: set[int] = field(default_factory=set)
    documents: set[bytes] = field(default_factory=set)

    def fresh(self, text: str) -> bool:
        """Return whether the text is new enough to keep; a kept text's lines count as seen
        afterwards.
        """
        mark = hashlib.blake2b(text.encode("utf-8", "ignore"), digest_size=12).digest()
        if mark in self.documents:
            return False
        self.documents.add(mark)
        keys = [hash(line.strip()) for line in text.split("\n") if len(line.strip()) > 24]
        if not keys:
            return False
        if sum(key in self.lines for key in keys) > SEEN_LINE_SHARE * len(keys):
            return False
        self.lines.update(keys)
        return True


def html_to_text(page: str) -> str:
    """Strip an HTML page to plain text; layout is kept only as line breaks."""
    page = TAG_BLOCK.sub(" ", page)
    page = html.unescape(TAG_ANY.sub("", TAG_BREAK.sub("\n", page)))
    lines = [line.rstrip() for line in page.replace("\xa0", " ").replace("\xb6", "").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def is_plain(text: str) -> bool:
    """Return whether the text looks like code or prose, not data tables or another script."""
    if not MIN_FILE_BYTES <= len(text) <= MAX_FILE_BYTES:
        return False
    sample = text[:20_000]
    digits = sum(c.isdigit() for c in sample)
    foreign = sum(ord(c) > 126 for c in sample)
    longest = max(len(line) for line in sample.split("\n"))
    return digits < 0.12 * len(sample) and foreign < 0.02 * len(sample) and longest < 2_000


def package_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the Python and reStructuredText files in a folder, a wheel, or a folder
    of wheels.
    """
    if root.suffix == ".whl":
        with zipfile.ZipFile(root) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith((".py", ".rst", ".md")):
                    yield name, archive.read(name).decode("utf-8", "ignore")
        return
    wheels = sorted(root.glob("*.whl"))
    for wheel in wheels:
        yield from package_files(wheel)
    for path in [] if wheels else sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path.read_text("utf-8", "ignore")


def document_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of documents: plain text, reStructuredText, Markdown, HTML, and texts
    inside zip files.
    """
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if not path.is_file() or path.is_symlink():
            continue
        if path.suffix == ".html":
            yield name, html_to_text(path.read_text("utf-8", "ignore"))
        elif path.suffix in {".txt", ".rst", ".md"}:
            yield name, path.read_text("utf-8", "ignore")
        elif path.suffix == ".zip":
            with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
                for inner in sorted(n for n in archive.namelist() if n.endswith(".txt")):
                    yield f"{name}/{inner}", archive.read(inner).decode("utf-8", "ignore")


def is_held_out(name: str) -> bool:
    """Return whether a file belongs to a package or document kept for the examination."""
    return any(part.split("-")[0] in HELD_OUT for part in re.split(r"[/.]", name.lower()))


def split_long(text: str) -> list[str]:
    """Cut a book into pieces that pass the size filter, at paragraph ends."""
    if len(text) <= MAX_FILE_BYTES:
        return [text]
    pieces, piece, size = [], [], 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        size += len(paragraph) + 2
        if size > 60_000:
            pieces.append("\n\n".join(piece))
            piece, size = [], 0
    return [*pieces, "\n\n".join(piece)]


def gather(out: Path, packages: list[Path], documents: list[Path]) -> None:
    """Write WORK/code.jsonl and WORK/docs.jsonl, one {name, text} a line, duplicates removed."""
    out.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    for kind, roots, reader in (
        ("docs", documents, document_files),
        ("code", packages, package_files),
    ):
        kept = 0
        with (out / f"{kind}.jsonl").open("w") as sink:
            for root in roots:
                for name, text in reader(root):
                    if is_held_out(name) or SKIPPED_PARTS.search(name):
                        continue
                    for piece in split_long(text) if kind == "docs" else [text]:
                        if is_plain(piece) and seen.fresh(piece):
                            kept += len(piece)
                            record = {"root": root.name, "name": name, "text": piece}
                            sink.write(json.dumps(record) + "\n")
        print(f"{kind}: {kept / 1e6:.1f} MB")  # noqa: T201  a command line tool's only output


def read_texts(path: Path) -> list[str]:
    """Return the texts of a gathered file in file order."""
    with path.open() as source:
        return [json.loads(line)["text"] for line in source]


def train_tokenizer(out: Path, sample_bytes: int = 40_000_000) -> None:
    """Train the byte-level BPE on a sample (code and documents half and half) and write
    WORK/tokenizer.json.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    sample: list[str] = []
    for kind in ("code", "docs"):
        texts, size = read_texts(out / f"{kind}.jsonl"), 0
        rng.shuffle(texts)
        for text in texts:
            if size > sample_bytes // 2:
                break
            sample.append(text)
            size += len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(out / "tokenizer.json"))


def mix_to_share(code: list[str], docs: list[str], docs_share: float) -> list[str]:
    """Return code and documents together, the longer side cut so that documents make up the share
    of characters.
    """
    code_size, docs_size = sum(map(len, code)), sum(map(len, docs))
    total = min(docs_size / docs_share, code_size / (1 - docs_share))
    kept: list[str] = []
    for texts, room in ((docs, docs_share * total), (code, (1 - docs_share) * total)):
        for text in texts:
            room -= len(text)
            if room < 0:
                break
            kept.append(text)
    return kept


def tokenise(out: Path, limit_bytes: int, docs_share: float) -> None:
    """Write WORK/tokens_NN.xz (uint16 documents closed by <|endoftext|>) until the packed size
    reaches the limit.

    Documents are shuffled; shards of about 12 M tokens are packed one by one so that the limit is
    met by dropping the last.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    end = np.array([tokenizer.token_to_id("<|endoftext|>")], np.uint16)
    code, docs = read_texts(out / "code.jsonl"), read_texts(out / "docs.jsonl")
    rng = random.Random(1)
    rng.shuffle(code)
    rng.shuffle(docs)
    texts = mix_to_share(code, docs, docs_share)
    rng.shuffle(texts)
    shard: list[np.ndarray] = []
    total_bytes, total_tokens, size, index = 0, 0, 0, 0
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch_fast(
            texts[start : start + 256], add_special_tokens=False
        ):
            shard += [np.array(encoding.ids, np.uint16), end]
            size += len(encoding.ids) + 1
        if size < 12_000_000 and start + 256 < len(texts):
            continue
        packed = lzma.compress(np.concatenate(shard).tobytes(), preset=6 | lzma.PRESET_EXTREME)
        if total_bytes + len(packed) > limit_bytes:
            break
        (out / f"tokens_{index:02d}.xz").write_bytes(packed)
        total_bytes, total_tokens, index = total_bytes + len(packed), total_tokens + size, index + 1
        print(
            f"shard {index}: {total_tokens / 1e6:.1f} M tokens, {total_bytes / 2**20:.1f} MiB",
            flush=True,
        )  # noqa: T201
        shard, size = [], 0


def main() -> None:
    """Run one step of the corpus build from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("gather", "tokenizer", "tokens"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, nargs="*", default=[])
    parser.add_argument("--documents", type=Path, nargs="*", default=[])
    parser.add_argument("--limit-bytes", type=int, default=56 * 2**20)
    parser.add_argument("--docs-share", type=float, default=0.28)
    args = parser.parse_args()
    if args.step == "gather":
        gather(args.out, args.packages, args.documents)
    elif args.step == "tokenizer":
        train_tokenizer(args.out)
    else:
        tokenise(args.out, args.limit_bytes, args.docs_share)


if __name__ == "__main__":
    main()
