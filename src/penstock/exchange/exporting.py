"""The model of an exchange, as a folder that `transformers` reads."""

from __future__ import annotations

import json

from penstock.exchange.layout import named_weights
from penstock.exchange.opening import OpenedRun
from penstock.storage import open_storage
from penstock.train.exporting import write_model
from penstock.train.folders import writable_folder


def export_model(opened: OpenedRun, dest: str) -> int:
    """Write the model as far as its windows are closed; returns how many that are. Disturbs nobody.

    Args:
        opened: The run.
        dest: The folder; files of these names in it are replaced.
    """
    folder = writable_folder(open_storage(dest), what="export folder", remedy="name another")
    replica = opened.replica()
    replica.catch_up()
    facts = opened.facts
    write_model(
        folder,
        named_weights(facts.layout, replica.weights),
        model=facts.settings.model,
        config=json.loads(facts.model_config) if facts.model_config else None,
        vocab_size=facts.vocab_size,
        max_seq_len=facts.settings.sequence_length,
        tokenizer=opened.tokenizer.definition.encode(),
        end_of_text=facts.end_of_text,
    )
    return replica.learned
