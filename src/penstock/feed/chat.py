"""Chats as tokens, with a mark on everything but the assistant's turns: those are what is learned.

A chat is cut into spans: texts, and the special tokens of the template, which are put in by id. So a turn that spells
``<|im_end|>`` has letters in it and no end. Where a learned span begins, tokenising begins anew, as it does when the
model answers a prompt.

    chatml    <|im_start|>role\\ncontent<|im_end|>\\n
    llama3    <|start_header_id|>role<|end_header_id|>\\n\\ncontent<|eot_id|>
    plain     <|role|>\\ncontent\\n, with end of text behind each of the assistant's turns; for any tokenizer
    a Jinja template, as it comes with a tokenizer
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.errors import ConfigError, MissingExtraError
from penstock.feed.known_tokenizer import KnownTokenizer
from penstock.feed.labels import MASKED
from penstock.feed.tokenizer import Encoded, Tokenizer

_log = logging.getLogger(__name__)

LEARNED_ROLE = "assistant"
_NEEDED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
}

_SIGN = "\ue0f7"  # of private use: in no text that anybody wrote
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks of what is learned, in some templates; here that follows from the turns."""

Message = dict[str, str]


class Span(NamedTuple):
    """A stretch of a chat: a special token, or a text."""

    token: str | None
    text: str
    learned: bool


class ChatFormat:
    """One way to write chats for one tokenizer. Pickles; safe for threads."""

    def __init__(self, tokenizer: Tokenizer | KnownTokenizer, template: str | None = None) -> None:
        """Choose the template.

        Args:
            tokenizer: Whose special tokens it uses.
            template: A name, or a Jinja template; else the tokenizer's own, or the first that its tokens suit.
        """
        self._tokenizer = tokenizer
        self._specials = special_tokens(tokenizer.definition)
        self.template = template or tokenizer.chat_templates.get("default") or self._suiting()
        missing = [token for token in _NEEDED.get(self.template, ()) if token not in self._specials]
        if missing:
            suiting = [name for name, needed in _NEEDED.items() if all(token in self._specials for token in needed)]
            raise ConfigError(
                f"the tokenizer has no special token {', '.join(missing)}, which chat template {self.template!r} "
                f"needs: choose {' or '.join(suiting)}, or give a Jinja template"
            )
        self._spans = self._by_name() if self.template in _NEEDED else _JinjaTemplate(self.template, tokenizer).spans

    def __reduce__(self) -> tuple[object, ...]:
        return ChatFormat, (self._tokenizer, self.template)

    @property
    def fingerprint(self) -> str:
        """Names it: equal means equal spans of equal chats."""
        return "sha256:" + hashlib.sha256(f"chat 1\n{LEARNED_ROLE}\n{self.template}".encode()).hexdigest()

    def encode(self, chats: Sequence[Sequence[Message]]) -> Encoded:
        """Ids of each chat; `MASKED` is set on those that are not to be learned."""
        spans, counts = [], []
        for messages in chats:
            mine = list(self._cut(self._spans(messages)))
            if not mine or not self._is_ended(mine):
                ends_learned = bool(messages) and messages[-1]["role"] == LEARNED_ROLE
                mine.append(Span(self._tokenizer.end_of_text, "", learned=ends_learned))
            spans += mine
            counts.append(len(mine))
        is_text = np.fromiter((span.token is None for span in spans), dtype=bool, count=len(spans))
        learned = np.fromiter((span.learned for span in spans), dtype=bool, count=len(spans))
        texts, offsets = self._tokenizer.encode_plain([span.text for span in spans if span.token is None])
        lengths = np.ones(len(spans), dtype=np.int64)
        lengths[is_text] = np.diff(offsets)
        ids = np.empty(int(lengths.sum()), dtype=np.uint32)
        of_text = np.repeat(is_text, lengths)
        ids[of_text] = texts
        known = {**self._specials, self._tokenizer.end_of_text: self._tokenizer.end_of_text_id}
        ids[~of_text] = [known[span.token] for span in spans if span.token is not None]
        ids[np.repeat(~learned, lengths)] |= MASKED
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        return Encoded(ids, bounds[np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])])

    def _suiting(self) -> str:
        chosen = next(name for name, needed in _NEEDED.items() if all(token in self._specials for token in needed))
        _log.warning(
            "the tokenizer brings no chat template: chats are written as %r; chat_template= says otherwise", chosen
        )
        return chosen

    def _by_name(self) -> Callable[[Sequence[Message]], Iterator[Span]]:
        return {"chatml": _chatml, "llama3": self._llama3, "plain": self._plain}[self.template]

    def _cut(self, spans: Iterator[Span]) -> Iterator[Span]:
        """Join texts that lie together and are learned alike: a tokenizer may join what a template has apart."""
        held: Span | None = None
        for span in spans:
            if held and span.token is None and span.learned == held.learned:
                held = Span(None, held.text + span.text, held.learned)
                continue
            if held and held.text:
                yield held
            held = span if span.token is None else None
            if span.token is not None:
                yield span
        if held and held.text:
            yield held

    @staticmethod
    def _is_ended(spans: list[Span]) -> bool:
        """Whether a special token closes the chat already, white space behind it aside."""
        last = spans[-1] if spans[-1].token is not None or spans[-1].text.strip() else spans[max(0, len(spans) - 2)]
        return last.token is not None

    def _llama3(self, messages: Sequence[Message]) -> Iterator[Span]:
        if "<|begin_of_text|>" in self._specials:
            yield Span("<|begin_of_text|>", "", learned=False)
        for message in messages:
            learned = message["role"] == LEARNED_ROLE
            yield Span("<|start_header_id|>", "", learned=False)
            yield Span(None, message["role"], learned=False)
            yield Span("<|end_header_id|>", "", learned=False)
            yield Span(None, "\n\n", learned=False)
            yield Span(None, message["content"], learned)
            yield Span("<|eot_id|>", "", learned)

    def _plain(self, messages: Sequence[Message]) -> Iterator[Span]:
        for message in messages:
            learned = message["role"] == LEARNED_ROLE
            yield Span(None, f"<|{message['role']}|>\n", learned=False)
            yield Span(None, message["content"], learned)
            yield Span(self._tokenizer.end_of_text, "", learned) if learned else Span(None, "\n", learned=False)


def _chatml(messages: Sequence[Message]) -> Iterator[Span]:
    for message in messages:
        learned = message["role"] == LEARNED_ROLE
        yield Span("<|im_start|>", "", learned=False)
        yield Span(None, message["role"] + "\n", learned=False)
        yield Span(None, message["content"], learned)
        yield Span("<|im_end|>", "", learned)
        yield Span(None, "\n", learned=False)


class _JinjaTemplate:
    """A template as tokenizers bring it. What the assistant said is what a turn adds to the prompt before it."""

    def __init__(self, source: str, tokenizer: Tokenizer | KnownTokenizer) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtraError(f"a Jinja chat template needs jinja2 ({error}): pip install jinja2") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **_: orjson.dumps(value).decode()
        self._error = TemplateError
        try:
            self._template = environment.from_string(_GENERATION.sub("", source))
        except TemplateError as error:
            raise ConfigError(
                f"chat_template={source[:40]!r} is neither one of {', '.join(_NEEDED)} nor a Jinja template: {error}"
            ) from error
        if "{" not in source:
            raise ConfigError(f"chat_template={source!r} is unknown: expected {', '.join(_NEEDED)} or a Jinja template")
        specials = special_tokens(tokenizer.definition)
        self._names = {
            "bos_token": next((token for token in ("<|begin_of_text|>", "<s>", "<bos>") if token in specials), ""),
            "eos_token": tokenizer.end_of_text,
        }
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._signs = {token: f"{_SIGN}{number}{_SIGN}" for number, token in enumerate(longest_first)}

    def spans(self, chat: Sequence[Message]) -> Iterator[Span]:
        messages = [{**message, "content": self._hidden(message["content"])} for message in chat]
        done = ""
        for place, message in enumerate(messages):
            if message["role"] != LEARNED_ROLE:
                continue
            prompt = self._render(messages[:place], add_generation_prompt=True)
            whole = self._render(messages[: place + 1], add_generation_prompt=False)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise ConfigError(
                    f"the chat template writes earlier turns anew when turn {place} is added, so what the assistant "
                    f"said there cannot be told apart: choose chat_template={', '.join(map(repr, _NEEDED))}"
                )
            yield from self._span(prompt[len(done) :], learned=False)
            yield from self._span(whole[len(prompt) :], learned=True)
            done = whole
        rest = self._render(messages, add_generation_prompt=False)
        yield from self._span(rest[len(done) :] if rest.startswith(done) else "", learned=False)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, **self._names
            )
        except self._error as error:
            raise ConfigError(f"the chat template refuses a chat: {error}") from error
        except Exception as error:  # whatever the template does with a turn: it is the user's program
            raise ConfigError(
                f"the chat template fails on a chat ({type(error).__name__}: {error}): mend the template, or choose "
                f"chat_template={', '.join(map(repr, _NEEDED))}"
            ) from error

    def _span(self, text: str, *, learned: bool) -> Iterator[Span]:
        """A rendered text, cut at the template's special tokens; what turns spell gets its letters back."""
        at = 0
        for found in self._special.finditer(text):
            if found.start() > at:
                yield Span(None, self._shown(text[at : found.start()]), learned)
            yield Span(found.group(), "", learned)
            at = found.end()
        if at < len(text):
            yield Span(None, self._shown(text[at:]), learned)

    def _hidden(self, text: str) -> str:
        """A turn's text without special tokens: each that it spells is a sign that no template knows."""
        return self._special.sub(lambda found: self._signs[found.group()], text)

    def _shown(self, text: str) -> str:
        for token, sign in self._signs.items():
            text = text.replace(sign, token) if _SIGN in text else text
        return text


def special_tokens(definition: str) -> dict[str, int]:
    """The special tokens of a `tokenizer.json`, and their ids."""
    fields: dict[str, Any] = orjson.loads(definition)
    return {token["content"]: int(token["id"]) for token in fields.get("added_tokens") or () if token.get("special")}


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
