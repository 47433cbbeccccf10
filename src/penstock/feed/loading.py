"""From what the user names to a tokenizer, with the engine that suits it."""

from __future__ import annotations

from pathlib import Path

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed.engines import choose_engine
from penstock.feed.tokenizer import Tokenizer

_COMPARED_TEXTS = 200
_COMPARED_CHARS = 2_000


def read_definition(spec: str) -> str:
    """The content of a `tokenizer.json`: a file of that kind, or a folder that holds one."""
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"tokenizer {spec!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: expected a tokenizer.json") from error


def load_tokenizer(spec: str, blocks: BlockManager | None = None) -> Tokenizer:
    """A tokenizer, with the fastest engine that gives the reference's ids, also on some of the data set's texts."""
    definition = read_definition(spec)
    try:
        return Tokenizer(definition, engine=choose_engine(definition, first_texts(blocks) if blocks else []))
    except ConfigError as error:
        raise ConfigError(f"{spec}: {error}") from error


def first_texts(blocks: BlockManager) -> list[str]:
    """A few texts to compare engines by, none of them long."""
    if blocks.manifest.header.text_column is None or not blocks.manifest.total_samples:
        return []
    texts = blocks.get_chunk(0, 0, min(_COMPARED_TEXTS, blocks.get_block(0).sample_count))
    return [text[:_COMPARED_CHARS] for text in texts]
