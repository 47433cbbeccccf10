"""Plans: who trains what, in what order. Pure arithmetic: no I/O, no clock, no mutable random state.

    claims    chunks in order; the ledger leases the next one to whoever asks
    strided   global batches of an order (sequential, shuffled, shard-local), dealt [rank::world]
    pages     which rows of a Parquet data set a (seed, window) has to read

A plan answers with numbers only. Below: `types`. Above: the ledger, which is handed a plan and knows nothing else of
order; the feed, which reads what a plan says. Exported here is what needs no numpy, since the ledger must start
quickly; the rest is imported from `orders`, `strided`, `pages` and `permutation`.
"""

from penstock.plans.claims import ClaimsPlan, PlannedChunk

__all__ = ["ClaimsPlan", "PlannedChunk"]
