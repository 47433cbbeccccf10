"""The outer step: what replicas changed on average, taken over with a learning rate and Nesterov momentum.

Local-update training lets replicas run on their own for a round and treats the mean of what they changed as one
gradient. With rate 1 and no momentum it is plain averaging, to the bit.
"""

from __future__ import annotations

from penstock.train.trainer import State

PREFIX = "outer."
"""Its momentum lies in the checkpoint under the name of each weight: a resumed run goes on exactly."""


def outer_step(base: State, merged: State, *, learning_rate: float, momentum: float) -> State:
    """The state of a commit, from the one before it and what the replicas' merge came to.

    Args:
        base: What all replicas set out from, with the momentum so far.
        merged: What their merge came to.
        learning_rate: 1 takes the merge as it is.
        momentum: 0 keeps none.
    """
    if learning_rate == 1.0 and momentum == 0.0:
        return merged
    stepped = dict(merged)
    for name, tensor in merged.items():
        if not name.startswith("model.") or not tensor.is_floating_point():
            continue
        start = base[name].double()
        change = tensor.double() - start
        if momentum:
            kept = base.get(PREFIX + name)
            speed = change if kept is None else change + momentum * kept.double()
            stepped[PREFIX + name] = speed.to(tensor.dtype)
            change = change + momentum * speed
        stepped[name] = (start + learning_rate * change).to(tensor.dtype)
    return stepped
