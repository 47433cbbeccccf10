"""What a tiktoken file does not say about itself: how text is cut into words, and which special tokens there are.

Known encodings are recognised by their content. A pattern here is spelled as the `tokenizers` library needs it, whose
expressions read ``{1,3}+`` otherwise than tiktoken's; each cuts every text as the original does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_ONE_DIGIT = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_BY_CASE = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a family of tokenizers treats text, apart from its vocabulary."""

    pattern: str
    """What a word is: no token reaches over the end of one."""
    end_of_text: str = "<|endoftext|>"
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the known vocabulary; another one of the same pattern has its own."""
    normalizer: str | None = None
    """What happens to a text first: ``NFC``, or nothing."""


def _numbered(first: int, *names: str) -> dict[str, int]:
    return {name: first + place for place, name in enumerate(names)}


def _reserved(word: str, start: int, stop: int) -> list[str]:
    return [f"<|{word}_{number}|>" for number in range(start, stop)]


_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

ENCODINGS: dict[str, Encoding] = {
    "r50k_base": Encoding(pattern=GPT2, special_tokens={"<|endoftext|>": 50256}),
    "p50k_base": Encoding(pattern=GPT2, special_tokens={"<|endoftext|>": 50256}),
    "cl100k_base": Encoding(
        pattern=_THREE_DIGITS,
        special_tokens={**_numbered(100257, "<|endoftext|>", *_FIM), "<|endofprompt|>": 100276},
    ),
    "o200k_base": Encoding(
        pattern=_BY_CASE, special_tokens={"<|endoftext|>": 199999, "<|endofprompt|>": 200018}
    ),
    "llama3": Encoding(
        pattern=_THREE_DIGITS,
        end_of_text="<|end_of_text|>",
        special_tokens=_numbered(
            128000,
            "<|begin_of_text|>",
            "<|end_of_text|>",
            *_reserved("reserved_special_token", 0, 2),
            "<|finetune_right_pad_id|>",
            "<|step_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
            "<|image|>",
            *_reserved("reserved_special_token", 2, 246),
        ),
    ),
    "llama4": Encoding(
        pattern=_BY_CASE,
        end_of_text="<|end_of_text|>",
        special_tokens=_numbered(
            200000,
            "<|begin_of_text|>",
            "<|end_of_text|>",
            *_FIM,
            "<|header_start|>",
            "<|header_end|>",
            "<|eom|>",
            "<|eot|>",
            "<|step|>",
            *_reserved("text_post_train_reserved_special_token", 0, 6),
            "<|python_start|>",
            "<|python_end|>",
            "<|finetune_right_pad|>",
            *_reserved("text_post_train_reserved_special_token", 8, 69),
            "<|image_start|>",
            "<|image_end|>",
            *_reserved("vision_reserved_special_token", 0, 2),
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
            *_reserved("vision_reserved_special_token", 2, 6),
            "<|image|>",
            "<|vision_reserved_special_token_6|>",
            "<|patch|>",
            *_reserved("vision_reserved_special_token", 7, 1048),
            *_reserved("reasoning_reserved_special_token", 0, 8),
            "<|reasoning_thinking_start|>",
            "<|reasoning_thinking_end|>",
            *_reserved("reserved_special_token", 0, 2048 - 1144),
        ),
    ),
    "qwen": Encoding(
        pattern=_ONE_DIGIT,
        normalizer="NFC",
        special_tokens=_numbered(
            151643, "<|endoftext|>", "<|im_start|>", "<|im_end|>", *_reserved("extra", 0, 205)
        ),
    ),
}  # fmt: skip
"""By name; the special tokens are those of the vocabulary below."""
ENCODINGS["gpt2"] = ENCODINGS["r50k_base"]

KNOWN: dict[str, str] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "r50k_base",
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": "p50k_base",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": "cl100k_base",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": "o200k_base",
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": "llama3",
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": "llama4",
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": "qwen",
}
"""The SHA-256 of a file as it is published, by which its vocabulary is recognised."""
