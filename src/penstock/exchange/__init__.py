"""Exchange: training across the internet through buckets, by workers that share no network and no trust.

    dataset bucket ── pages by (uid, window) ──► miner: local steps ──► codec ──► contribution
                                                                                      │ gradients bucket
    validator: loss before and after, on assigned and on random pages ◄───────────────┤
        └─► scores, peer list (aggregator bucket) ──────────► aggregator ◄────────────┘
                                                                │ size, header, digest, shapes, ranges, norm; folded
                                                                │ one by one, in the manifest's order
                                                                ▼
                        aggregate, then its manifest: put only where there is none (aggregator bucket)
                                                                │ a checkpoint every K windows (checkpoints bucket)
                                                                ▼
                        every replica: weights - aggregate, one subtraction in fp32: the same bits everywhere

A window opens when the manifest before it was written, by the store's clock, and closes when every seat is taken or its
time is over. Only manifests feed the outer step. Nothing that a miner sends is executed, or trusted before it was
checked. Below: `train` (models, steps), `pages` (who has to read what), `storage` (bytes, tries again). Above: `cli`.
This file imports nothing, and neither `status` nor `picture` imports torch.
"""
