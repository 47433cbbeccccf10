"""Which process of how many this is: said by the caller, and never guessed against what the launcher says."""

from __future__ import annotations

import logging
import os

from penstock.errors import ConfigError
from penstock.feed.numbers import whole_number

_log = logging.getLogger(__name__)


def settle_world(rank: int | None, world_size: int | None, batch_size: int) -> tuple[int, int]:
    """The rank and the world size to go by; alone where nothing speaks of others.

    Nothing given under a launcher is refused, not filled in: as one of one, every process would train on all samples;
    as one of many, a process that wants all of them, to evaluate say, would get a part. Both would go unseen.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank} and world_size={world_size} belong together: give both, or neither")
    if rank is None or world_size is None:
        launched = launched_world()
        if launched is not None and launched[1] > 1:
            raise ConfigError(
                f"this process is RANK={launched[0]} of WORLD_SIZE={launched[1]}, and the loader was not told: give "
                f"rank={launched[0]} and world_size={launched[1]} for a share of every batch (rank_and_world_size() of "
                "penstock.feed.torch_adapter finds them), or rank=0 and world_size=1 for all of it"
            )
        return 0, 1
    rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not in a world of {world_size}: expected 0 to {world_size - 1}")
    if batch_size < world_size and rank == 0:  # one of them is enough to say it
        _log.warning(
            "batch_size=%d is that of all %d ranks together: ranks from %d on never have a row",
            batch_size,
            world_size,
            batch_size,
        )
    return rank, world_size


def launched_world() -> tuple[int, int] | None:
    """RANK and WORLD_SIZE, as torchrun and others set them; None where they are not both there."""
    told = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if told[0] is None or told[1] is None:
        return None
    try:
        return int(told[0]), int(told[1])
    except ValueError as error:
        raise ConfigError(
            f"RANK={told[0]!r} and WORLD_SIZE={told[1]!r}: expected two numbers; unset or mend them"
        ) from error
