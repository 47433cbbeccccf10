"""The statements that a training makes all the time, each a whole transaction.

They change rows only where the pure transitions of `state.py` allow it without further question: the chunk is open, or
leased under this very token; the session is alive, nobody else is due to be fenced, and no chunk that goes by a
priority is before it. Where they change nothing, the same call takes the long way through `state.py`, which finds out
why.
"""

from __future__ import annotations

_LEASED = "epoch, block_id, chunk_id, samples, token, committed, committed_offset"
_BEGUN = "committed > 0 OR committed_offset > 0"
_HIGH = "SELECT 1 FROM chunks high WHERE high.epoch = {epoch} AND high.rank <> 0 AND high.rank < 0 AND high.phase = 0"

MOVE = {
    # trained, offset, steps; epoch, block, chunk; session, token; trained, offset, samples
    name: f"UPDATE chunks SET {phase}trained = ?, offset_in = ?, steps = ? WHERE epoch = ? AND block_id = ? "
    "AND chunk_id = ? AND phase = 1 AND session = ? AND token = ? AND trained <= ? AND offset_in <= ? "
    f"AND samples {samples} ?"
    for name, phase, samples in (("record", "", ">="), ("complete", "phase = 2, ", "="))
}

RENEW = "UPDATE sessions SET deadline = {now} + ?, boot_id = ? WHERE session_id = ? AND state = 'active'"

SQLITE_OPEN = (  # first_changed and chunk of the last look, session, now, boot id, count
    f"SELECT c.{_LEASED.replace(', ', ', c.')}, CASE WHEN {_BEGUN} THEN c.exclusions ELSE run.exclusions END, "
    "run.first_changed FROM run CROSS JOIN epochs here ON here.epoch = run.epoch CROSS JOIN chunks c "
    "ON c.epoch = run.epoch AND c.block_id = here.first_block "
    "AND c.chunk_id >= CASE WHEN run.first_changed = ? THEN ? ELSE here.first_chunk END "
    "WHERE c.phase = 0 AND c.rank = 0 AND NOT EXISTS (SELECT 1 FROM sessions INDEXED BY sessions_active "
    "WHERE state = 'active' AND session_id != ? AND (deadline <= ? OR boot_id != ?)) "
    f"AND NOT EXISTS ({_HIGH.format(epoch='run.epoch')}) LIMIT ?"
)
"""In order without being told: it walks the primary key, and told so SQLite would read and sort all of them."""
SQLITE_NEXT = (  # session; epoch, block, chunk, token, samples; exclusions, first_changed; now, boot id
    "UPDATE chunks SET phase = 1, session = ?1, exclusions = ?7 WHERE epoch = ?2 AND block_id = ?3 AND chunk_id = ?4 "
    f"AND phase = 0 AND rank = 0 AND token = ?5 AND samples = ?6 AND NOT ({_BEGUN}) AND EXISTS (SELECT 1 FROM run "
    "WHERE epoch = ?2 AND exclusions = ?7 AND first_changed = ?8) "
    "AND EXISTS (SELECT 1 FROM sessions WHERE session_id = ?1 AND state = 'active') "
    "AND NOT EXISTS (SELECT 1 FROM sessions INDEXED BY sessions_active "
    "WHERE state = 'active' AND session_id != ?1 AND (deadline <= ?9 OR boot_id != ?10)) "
    f"AND NOT EXISTS ({_HIGH.format(epoch='?2')})"
)
"""The chunk behind the last one, without a look: it is the first open one, unless somebody else has claimed since or
anything was opened again."""
SQLITE_LEASE = (  # session, exclusions, epoch, block, chunk, token, session
    "UPDATE chunks SET phase = 1, session = ?, exclusions = ? WHERE epoch = ? AND block_id = ? AND chunk_id = ? "
    "AND phase = 0 AND token = ? AND EXISTS (SELECT 1 FROM sessions WHERE session_id = ? AND state = 'active')"
)
"""A look without a lock, and an UPDATE if the chunk still is as it was seen: RETURNING alone costs a bare UPDATE."""

POSTGRES_CLAIM = (  # session, first_changed and chunk of the last look, session, boot id, count, session, request
    # The share lock keeps the session from being fenced under the claim.
    "WITH me AS MATERIALIZED (SELECT session_id FROM sessions WHERE session_id = ? AND state = 'active' FOR SHARE), "
    "here AS MATERIALIZED (SELECT epochs.*, run.exclusions, run.first_changed FROM epochs JOIN run USING (epoch)), "
    "next AS MATERIALIZED (SELECT epoch, block_id, chunk_id FROM chunks WHERE epoch = (SELECT epoch FROM here) "
    "AND block_id = (SELECT first_block FROM here) "
    "AND chunk_id >= (SELECT CASE WHEN first_changed = ? THEN ? ELSE first_chunk END FROM here) "
    "AND phase = 0 AND rank = 0 AND EXISTS (SELECT 1 FROM me) "
    "AND NOT EXISTS (SELECT 1 FROM sessions WHERE state = 'active' AND session_id != ? "
    "AND (deadline <= {now} OR boot_id != ?)) "
    f"AND NOT EXISTS ({_HIGH.format(epoch='(SELECT epoch FROM here)')}) "
    "ORDER BY chunk_id LIMIT ? FOR UPDATE SKIP LOCKED) "
    "UPDATE chunks c SET phase = 1, session = ?, request = ?, "
    f"exclusions = CASE WHEN {_BEGUN} THEN c.exclusions ELSE (SELECT exclusions FROM here) END "
    "FROM next WHERE c.epoch = next.epoch AND c.block_id = next.block_id AND c.chunk_id = next.chunk_id "
    f"RETURNING c.{_LEASED.replace(', ', ', c.')}, c.exclusions, (SELECT first_changed FROM here)"
)
