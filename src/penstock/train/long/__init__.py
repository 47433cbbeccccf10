"""Sequences too long to be learned in one piece, learned in chunks of tokens, with memory set by the chunk.

    exact.py        any model whose tokens meet in attention alone: the gradients of the whole sequence, to rounding
      chunkable.py    what that asks of a model, and the built-in transformer as one
      huggingface.py  models of `transformers` as one: tried out before use, refused with what to change
      attention.py    attention to the chunk and to all before it; its backward pays the earlier ones their share
      kernels.py      the arithmetic of it, as the model itself has it;
      gpu_kernels.py  or as GPUs compute it fastest
      documents.py    which keys a chunk's queries may see
      memory.py       keys, values and their gradients, on the device;
      host_memory.py  or in host memory, two layers on the device

A chunk here is a run of tokens of a sequence (`chunk_size`), never a chunk of samples (`dataset_chunk_size`).
"""
