"""Plans: who trains what, in what order. Pure arithmetic: no I/O, no clock, no mutable random state.

    claims    chunks in order; the ledger leases the next one to whoever asks

A plan answers with numbers only. Below: `types`. Above: the ledger, which is handed a plan and knows nothing else of
order.
"""

from penstock.plans.claims import ClaimsPlan, PlannedChunk

__all__ = ["ClaimsPlan", "PlannedChunk"]
