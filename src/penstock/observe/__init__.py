"""Looking at a run: where it stands, whether the epoch holds, and a picture of it.

    RunFolder ──► ledger spans + manifest ──► prove ──► once / missing / twice
              └─► spans + metrics.jsonl ──► draw_run ──► picture.svg

Reads only; a run under way is not disturbed. Below: `ledger` and `blocks`. Beside: `train`, which writes what is read
here; neither imports the other. This file imports nothing, so that `penstock status` starts at once.
"""
