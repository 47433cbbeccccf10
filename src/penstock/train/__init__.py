"""Training: replicas learn chunks, or ranks learn batches together; checkpoint and ledger move together.

    run_training ──► prepare (config, tokenizer, ledger, last commit) ──► Replica ── claim, steps, complete
                                                             │              │
                       one worker:  CommitAlone ◄── boundary ┼──────────────┤
                       several:     MeetSupervisor ──► Supervisor: merge ──► Committer: checkpoint, then ledger
                                                             │                  ▲
                       ranks:                                └──► Job on every rank; rank 0 commits

`replica.py` is the training loop of one replica, `job.py` that of a rank; `staging.py` and `courses.py` bring them
batches, `trainer.py` makes a step of one. A boundary is where replicas become one state again: alone by saving it,
together by merging. `committing.py` is the only place that writes checkpoints: files first, sealed by a manifest, then
one ledger transaction that names its digest. Below: `feed` and `ledger`. Beside: `observe`, which reads what is written
here. This file imports nothing, so that settings can be read without torch.
"""
