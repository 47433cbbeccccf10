"""Training of models larger than their GPU: the host holds them, and layers come to the device when they are needed.

    layout ──► host: fp32 weights and moments, 16-bit images, gradients        sharing: the ranks of a machine
                 │ loading: images in, a few ahead        ▲ stepping: AdamW on the host, while the device computes
                 ▼                                        │
    decoder ──► passes: forward, head, backward ──► collecting: gradients out
                 fused: fewer kernels                     resident: units that stay on the device, with their optimizer

After a step's gradients everything is `due`: `stepping` (the host) and `visiting` (the device, weights and moments
passing through it) take the next part, whoever is free.

`trainer.py` is the whole as a `Trainer`; `lanes.py` are the streams everything moves in; `states.py` is the way to and
from checkpoints. `planning.py`, over `sizes.py` and `speeds.py`, says beforehand what a run will need. Below:
`train/models`, the cross-entropy and dice of `train/long`.
"""

from penstock.train.streamed.trainer import StreamedTrainer

__all__ = ["StreamedTrainer"]
