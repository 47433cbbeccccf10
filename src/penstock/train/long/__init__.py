"""Sequences too long to be learned in one piece, learned in chunks of tokens, in memory that a chunk sets.

    learning.py     which of the two a model learns by, as a `Trainer` asks for it
    ├ rollout.py      models with a carry (`models/carrying.py`): piece by piece, going back as far as asked
    │   tokens.py       a batch's documents, positions and labels, as far as it leaves them unsaid
    │   offloading.py   what going back needs, in host memory
    └ exact.py        models whose tokens meet in attention alone: the gradients of the whole sequence, to rounding
        chunkable.py    what that asks of a model, and the built-in transformer as one
        huggingface.py  models of `transformers` as one: tried out before use, refused with what to change
        attention.py    attention to the chunk and to all before it; its backward pays the earlier ones their share
        kernels.py      the arithmetic of it, as the model itself has it;
        fast_kernels.py or as the device computes it fastest
        documents.py    which keys a chunk's queries may see
        cross_entropy.py  the loss, and its gradient at once
        dice.py         random numbers that are drawn a second time
        memory.py       keys, values and their gradients, on the device;
        host_memory.py  or in host memory, two layers of them on the device
    choosing.py     ``chunk_size="auto"``: the largest that was tried and fits
    measuring.py    how much a graph holds on to

A chunk here is a run of tokens of a sequence (`chunk_size`), never a chunk of samples (`dataset_chunk_size`).
docs/long.md says when to use what.
"""
