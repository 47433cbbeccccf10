"""Tables of the ledger, the same in every store. A change here is a new VERSION; a ledger of another one is refused."""

VERSION = 3

TABLES = """
CREATE TABLE run (
    run_id INTEGER PRIMARY KEY CHECK (run_id = 1),
    version INTEGER NOT NULL,
    dataset_id TEXT NOT NULL,
    block_size INTEGER NOT NULL,
    chunk_size INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    total_steps INTEGER NOT NULL,
    next_step INTEGER NOT NULL,
    next_token INTEGER NOT NULL,
    exclusions INTEGER NOT NULL,
    first_changed INTEGER NOT NULL
);
CREATE TABLE sessions (
    session_id INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    generation INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'ended', 'fenced')),
    boot_id TEXT NOT NULL,
    deadline REAL NOT NULL,
    steps INTEGER NOT NULL,
    request INTEGER NOT NULL,
    step_request INTEGER NOT NULL,
    step INTEGER NOT NULL
);
CREATE INDEX sessions_active ON sessions (deadline, boot_id, session_id) WHERE state = 'active';
CREATE TABLE blocks (
    block_id INTEGER PRIMARY KEY,
    sample_count INTEGER NOT NULL,
    checksum TEXT NOT NULL
);
CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY,
    cursor_block INTEGER,
    cursor_chunk INTEGER,
    first_block INTEGER NOT NULL,
    first_chunk INTEGER NOT NULL,
    ranked_rank REAL,
    ranked_block INTEGER,
    ranked_chunk INTEGER,
    samples_committed INTEGER NOT NULL
);
CREATE TABLE chunks (
    epoch INTEGER NOT NULL,
    block_id INTEGER NOT NULL,
    chunk_id INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    phase INTEGER NOT NULL,
    session INTEGER NOT NULL,
    token INTEGER NOT NULL,
    trained INTEGER NOT NULL,
    offset_in INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    committed INTEGER NOT NULL,
    committed_offset INTEGER NOT NULL,
    exclusions INTEGER NOT NULL,
    rank REAL NOT NULL,
    request INTEGER NOT NULL,
    PRIMARY KEY (epoch, block_id, chunk_id)
) WITHOUT ROWID;
CREATE INDEX chunks_ranked ON chunks (epoch, rank, block_id, chunk_id) WHERE rank <> 0;
CREATE TABLE done_chunks (
    epoch INTEGER NOT NULL,
    block_id INTEGER NOT NULL,
    chunk_id INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    phase INTEGER NOT NULL,
    session INTEGER NOT NULL,
    token INTEGER NOT NULL,
    trained INTEGER NOT NULL,
    offset_in INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    committed INTEGER NOT NULL,
    committed_offset INTEGER NOT NULL,
    exclusions INTEGER NOT NULL,
    rank REAL NOT NULL,
    request INTEGER NOT NULL,
    PRIMARY KEY (epoch, block_id, chunk_id)
) WITHOUT ROWID;
CREATE TABLE priorities (
    block_id INTEGER NOT NULL,
    chunk_id INTEGER NOT NULL,
    rank REAL NOT NULL,
    PRIMARY KEY (block_id, chunk_id)
) WITHOUT ROWID;
CREATE INDEX priorities_by_rank ON priorities (rank, block_id, chunk_id);
CREATE TABLE exclusions (
    seq INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    block_id INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    reason TEXT NOT NULL,
    excluded_at REAL NOT NULL,
    request INTEGER NOT NULL
);
CREATE TABLE commits (
    seq INTEGER PRIMARY KEY,
    checkpoint_id TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    total_steps INTEGER NOT NULL,
    next_step INTEGER NOT NULL,
    committed_at REAL NOT NULL
);
CREATE TABLE spans (
    commit_seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    block_id INTEGER NOT NULL,
    chunk_id INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    start_offset INTEGER NOT NULL,
    stop_offset INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    session INTEGER NOT NULL,
    exclusions INTEGER NOT NULL,
    PRIMARY KEY (epoch, block_id, chunk_id, commit_seq)
) WITHOUT ROWID;
CREATE INDEX spans_by_commit ON spans (commit_seq);
CREATE TABLE loader_spans (
    commit_seq INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    session INTEGER NOT NULL,
    exclusions INTEGER NOT NULL,
    state TEXT NOT NULL
);
"""
"""In the words of SQLite.

`chunks` holds what is open or in hand and stays small; what is committed or excluded moves to `done_chunks`. A claim
searches `chunks` from the epoch's first open one on (`epochs.first_block`, `first_chunk`) or, while `run.first_changed`
stays the same, from where this process found the last one. It changes that row and no index; an open chunk carries the
token of its next lease, so no counter is touched either: a claim writes one page, as a bare UPDATE does. `request`
names the call that wrote a row: a caller that lost its connection finds out by it whether the call was carried out.
"""

FIRST_ROWS = (
    "INSERT INTO run (run_id, version, dataset_id, block_size, chunk_size, generation, epoch, total_steps, next_step, "
    f"next_token, exclusions, first_changed) VALUES (1, {VERSION}, ?, ?, ?, 0, 0, 0, 1, 1, 0, 0)",
    "INSERT INTO epochs VALUES (0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0)",
)
