"""Tables of the ledger. A change here is a new VERSION and a way from the old one."""

VERSION = 1

TABLES = """
CREATE TABLE run (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    dataset_id TEXT NOT NULL,
    block_size INTEGER NOT NULL,
    chunk_size INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    total_steps INTEGER NOT NULL,
    next_step INTEGER NOT NULL,
    next_token INTEGER NOT NULL
);
CREATE TABLE sessions (
    session_id INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    generation INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'ended', 'fenced')),
    boot_id TEXT NOT NULL,
    deadline REAL NOT NULL,
    steps INTEGER NOT NULL
);
CREATE INDEX sessions_active ON sessions (session_id) WHERE state = 'active';
CREATE TABLE blocks (
    block_id INTEGER PRIMARY KEY,
    sample_count INTEGER NOT NULL,
    checksum TEXT NOT NULL
);
CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY,
    cursor_block INTEGER,
    cursor_chunk INTEGER,
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
    PRIMARY KEY (epoch, block_id, chunk_id)
) WITHOUT ROWID;
CREATE INDEX chunks_unfinished ON chunks (phase, epoch, block_id, chunk_id) WHERE phase < 3;
CREATE TABLE commits (
    seq INTEGER PRIMARY KEY,
    checkpoint_id TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    total_steps INTEGER NOT NULL,
    next_step INTEGER NOT NULL
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
    PRIMARY KEY (epoch, block_id, chunk_id, commit_seq)
) WITHOUT ROWID;
CREATE INDEX spans_by_commit ON spans (commit_seq);
"""
