"""Text to token ids: a `tokenizer.json`, or a small byte-level BPE trained on the data itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.errors import ConfigError
from penstock.feed.engines import Engine, EngineName, IdType, ReferenceEngine, make_engine

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Several documents' ids, end to end; document i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: np.ndarray
    offsets: np.ndarray


class Tokenizer:
    """A tokenizer and the end-of-text id that closes each document. Pickles; safe for threads."""

    def __init__(
        self,
        definition: str,
        *,
        end_of_text: str | None = None,
        engine: EngineName | tuple[ReferenceEngine, Engine] = "tokenizers",
        chat_templates: Mapping[str, str] | None = None,
        origin: str = "",
    ) -> None:
        """Load a tokenizer.

        Args:
            definition: The content of a `tokenizer.json`.
            end_of_text: The token that closes a document; found among the usual ones where not given.
            engine: What does the work, by name; or made already, see `engines.fitting_engines`.
            chat_templates: How a chat becomes text, by name; kept, and no part of the fingerprint.
            origin: Where it came from, for people to read.
        """
        self.definition = definition
        self.chat_templates = dict(chat_templates or {})
        self.origin = origin
        if isinstance(engine, tuple):
            reference, self._engine = engine
        else:
            reference = ReferenceEngine(definition)
            self._engine: Engine = reference if engine == "tokenizers" else make_engine(engine, definition)
        self._vocabulary = reference.inner
        wanted = (end_of_text,) if end_of_text else _KNOWN_ENDS
        known = ((token, self._vocabulary.token_to_id(token)) for token in wanted)
        found, end_id = next(((token, token_id) for token, token_id in known if token_id is not None), ("", None))
        if end_id is None:
            raise ConfigError(f"the tokenizer knows none of {', '.join(wanted)}: name its end-of-text token")
        self.end_of_text = found
        self.end_of_text_id = end_id

    @property
    def chat_template(self) -> str | None:
        """How a chat becomes text, by the tokenizer's own word; None where it says nothing."""
        return self.chat_templates.get("default")

    @property
    def engine(self) -> EngineName:
        return self._engine.name

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.definition, self.end_of_text, self.engine, self.chat_templates, self.origin)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, so that every id fits; ids may have gaps."""
        return max(self._engine.vocab_size, 1 + max(self._vocabulary.get_added_tokens_decoder(), default=-1))

    @property
    def fingerprint(self) -> str:
        """Names this tokenizer, its engine and the engine's version: equal means equal ids."""
        told = f"{self._engine.name} {self._engine.version}\n{self.end_of_text}\n{self.definition}"
        return "sha256:" + hashlib.sha256(told.encode()).hexdigest()

    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of each text end to end, with nothing added, and where each text's begin."""
        return self._engine.encode(texts)

    def encode(self, texts: Sequence[str], dtype: IdType = np.uint32) -> Encoded:
        """Ids of each text, with the end-of-text id behind it."""
        return Encoded(*self._engine.encode(texts, end=self.end_of_text_id, dtype=dtype))


def _rebuild(
    definition: str, end_of_text: str, engine: EngineName, chat_templates: dict[str, str], origin: str
) -> Tokenizer:
    return Tokenizer(definition, end_of_text=end_of_text, engine=engine, chat_templates=chat_templates, origin=origin)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE: knows every byte, so no text is lost in it."""
    least = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < least:
        raise ConfigError(f"vocab_size={vocab_size} has no room for the {least} bytes and end of text: raise it")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return Tokenizer(engine.to_str(), end_of_text=END_OF_TEXT)
