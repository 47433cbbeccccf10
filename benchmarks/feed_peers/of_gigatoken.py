"""The limit of tokenising: gigatoken over the same texts, which lie in memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def alone(task: dict[str, Any]) -> dict[str, Any]:
    import gigatoken

    with Path(task["texts"]).open("rb") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    fields = json.loads(Path(task["tokenizer"]).read_text(encoding="utf-8"))
    fields["added_tokens"] = []
    began = time.perf_counter()
    tokenizer: Any = gigatoken.Tokenizer.from_json(json.dumps(fields))
    loaded = time.perf_counter()
    ids = tokenizer.encode_batch(texts).layout.content.data
    ended = time.perf_counter()
    count = len(ids) + len(texts)  # with the end of each text, which the others have too
    return {"tokens": count, "tokens_per_s": count / (ended - (began if task.get("load") else loaded))}
