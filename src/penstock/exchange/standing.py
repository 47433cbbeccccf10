"""Why a window was closed without somebody's contribution, as far as manifest and scores tell."""

from __future__ import annotations

import logging

import orjson

from penstock.errors import ArtifactRejected, ObjectNotFound
from penstock.exchange.keys import Keys
from penstock.exchange.manifests import Manifest
from penstock.exchange.places import read_limited
from penstock.exchange.scoring import ABSENT_FROM, Score, from_dict
from penstock.storage import Storage

_log = logging.getLogger(__name__)
_SCORES_BYTES = 4 << 20


def why_not_taken(storage: Storage, keys: Keys, validator: str, uid: str, manifest: Manifest) -> str:
    """A few words for the log of whoever sent it. One small request, where the manifest itself does not tell."""
    for each in manifest.rejected:
        if (each.uid, each.window) == (uid, manifest.window):
            return f"rejected: {each.reason}: {each.told}"
    if uid in manifest.missing:
        return "it was waited for and did not come in time"
    score = _score(storage, keys, validator, uid, manifest.scores_window)
    if score is not None and score.is_out:
        why = (
            f"flagged {' '.join(score.flags)}" if score.flags else f"its score is {score.score:.3f}, far below others'"
        )
        return f"out by the validator's word on window {manifest.scores_window}: {why}"
    if score is not None and score.absent >= ABSENT_FROM:
        return f"a reserve, having missed {score.absent} windows in a row; others had the seats"
    return "it had no seat in this window"


def _score(storage: Storage, keys: Keys, validator: str, uid: str, window: int | None) -> Score | None:
    """What was known of somebody when the peers of a window were chosen."""
    if window is None:
        return None
    key = keys.scores(validator, window)
    try:
        return from_dict(orjson.loads(read_limited(storage, key, _SCORES_BYTES))["scores"]).get(uid)
    except ObjectNotFound:
        return None
    except (ArtifactRejected, orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        _log.warning("%s cannot be read, so it does not say why: %s", key, error)
        return None
