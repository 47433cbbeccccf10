"""Long sequences in bounded memory.

    a batch ──► tokens.py: documents, positions, labels ──► pieces of chunk_size tokens, in order
                                                               │
                rollout.py: model with a carry ──► piece by piece, back after every piece or after a few

`rollout.py` is for models with a carry (`models/carrying.py`): it remembers forward exactly and goes back as far as
asked. `offloading.py` keeps what going back needs in the host's memory; `measuring.py` says how much that is. Above:
`trainer.py` and `chunked_segment_rollout` for loops of your own. docs/long.md says when to use what.
"""
