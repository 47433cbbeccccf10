"""From what the user names to a tokenizer, with the engine that suits it."""

from __future__ import annotations

from dataclasses import replace

from penstock.blocks import BlockManager
from penstock.errors import ConfigError, StorageError
from penstock.feed.engines import Engine, EngineName, ReferenceEngine, fitting_engines
from penstock.feed.hub_tokenizer import open_hub_tokenizer, refused
from penstock.feed.tokenizer import Tokenizer
from penstock.feed.tokenizer_files import DEFINITION, FolderFiles, NamedTokenizer, find_definition, read_tokenizer
from penstock.feed.tokenizer_name import FORMS, HubName, is_spelled_like_a_path, parse_tokenizer_name

_COMPARED_TEXTS = 100
_COMPARED_CHARS = 1_500


def find_tokenizer(spec: str, *, end_of_text: str | None = None) -> NamedTokenizer:
    """What a name stands for; see `tokenizer_name` for its forms. Reads, and fetches what is on the Hub.

    Args:
        spec: A `tokenizer.json`, a folder with one, a tiktoken file, or a model of the Hub.
        end_of_text: The token that ends a document, where it is not to be the one that the tokenizer's files name.
    """
    name = parse_tokenizer_name(spec)
    wanted = replace(name, end_of_text=end_of_text) if end_of_text else name
    if isinstance(wanted.place, HubName):
        try:
            files = open_hub_tokenizer(wanted.place)
            main = find_definition(files)
            return read_tokenizer(files, main, encoding=wanted.encoding, end_of_text=wanted.end_of_text)
        except StorageError as error:
            raise refused(spec, error) from error
    path = wanted.place
    if path.is_dir():
        files = FolderFiles(folder=path)
        main = _definition_in(files, spec)
    else:
        files = FolderFiles(folder=path.parent, only=None if path.name == DEFINITION else path.name)
        main = path.name
        if not path.exists():
            raise ConfigError(f"tokenizer {spec!r} cannot be read: No such file or directory: expected {FORMS}")
    return read_tokenizer(files, main, encoding=wanted.encoding, end_of_text=wanted.end_of_text)


def is_on_hub(spec: str) -> bool:
    """Whether a name means a model of the Hub."""
    return isinstance(parse_tokenizer_name(spec).place, HubName)


def _definition_in(files: FolderFiles, spec: str) -> str:
    try:
        return find_definition(files)
    except ConfigError as error:
        meant = (
            "" if is_spelled_like_a_path(spec) else f" (a folder here goes before the Hub: hf://{spec} is the model)"
        )
        raise ConfigError(f"{error}{meant}") from error


def make_tokenizer(named: NamedTokenizer, engine: EngineName | tuple[ReferenceEngine, Engine]) -> Tokenizer:
    """The tokenizer that was found, on an engine."""
    try:
        return Tokenizer(
            named.definition,
            end_of_text=named.end_of_text,
            engine=engine,
            chat_templates=named.chat_templates,
            origin=named.origin,
        )
    except ConfigError as error:
        told = f" ({named.told_by} names it)" if named.told_by else ""
        raise ConfigError(f"{named.origin}: {error}{told}") from error


def load_tokenizer(spec: str, blocks: BlockManager | None = None, *, end_of_text: str | None = None) -> Tokenizer:
    """A tokenizer, with the fastest engine that gives the reference's ids, also on some of the data set's texts."""
    named = find_tokenizer(spec, end_of_text=end_of_text)
    try:
        engine = fitting_engines(named.definition, first_texts(blocks) if blocks else [])
    except ConfigError as error:
        raise ConfigError(f"{named.origin}: {error}") from error
    return make_tokenizer(named, engine)


def first_texts(blocks: BlockManager) -> list[str]:
    """A few texts to compare engines by, none of them long."""
    if blocks.manifest.header.text_column is None or not blocks.manifest.total_samples:
        return []
    texts = blocks.get_chunk(0, 0, min(_COMPARED_TEXTS, blocks.get_block(0).sample_count))
    return [text[:_COMPARED_CHARS] for text in texts]
