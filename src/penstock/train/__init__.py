"""Training: replicas learn chunks; checkpoint and ledger move together.

    run_training ──► prepare (config, tokenizer, ledger, last commit) ──► Replica ── claim, steps, complete
                                                                            │
                       one worker:  CommitAlone ◄── boundary ───────────────┤
                       several:     MeetSupervisor ──► Supervisor: merge ──► Committer: checkpoint, then ledger

`replica.py` is the training loop; `staging.py` brings it batches, `trainer.py` makes a step of one. A boundary is where
replicas become one state again: alone by saving it, together by merging. `committing.py` is the only place that writes
checkpoints: files first, sealed by a manifest, then one ledger transaction that names its digest. Below: `feed` and
`ledger`. Beside: `observe`, which reads what is written here.
This file imports nothing, so that settings can be read without torch.
"""
