"""The ledger: which chunk was trained by whom, once, and with which checkpoint.

    join ──► claim ──► record / complete ──► commit(checkpoint)         the life of a chunk:
                │                                │                       open ─► leased ─► trained ─► committed
                └── Wait, EpochDone              └── restore(checkpoint)    ▲________│__________│ fenced, restored

`base.py` is the contract; `state.py` holds the life of a chunk as pure functions; `operations.py` and `handing.py`
apply them to rows of a database inside one transaction each; `sqlite.py` is the database that needs no server,
`postgres.py` the one for many machines. Below: `plans`, which knows the order. Above: `train` claims and commits,
`observe` and the CLI read. A checkpoint is a name and a digest here: the ledger knows no tensors and no files.

Fencing goes by session: a worker joins and gets one, its heartbeat keeps it alive, and all its leases live and end
with it. Who loses its session loses all it has not committed, because its weights hold all of that and cannot be
taken apart.
"""

from penstock.ledger.audit import EpochAudit, audit_epoch
from penstock.ledger.base import (
    BlockCatalog,
    Commit,
    Contribution,
    EpochDone,
    Lease,
    Ledger,
    LedgerStatus,
    LoaderProgress,
    LoaderSpan,
    Session,
    Wait,
)
from penstock.ledger.exclusions import Exclusion, Exclusions, SkipRange
from penstock.ledger.opening import has_ledger, open_ledger, without_secrets
from penstock.ledger.state import Progress, Span

__all__ = [
    "BlockCatalog",
    "Commit",
    "Contribution",
    "EpochAudit",
    "EpochDone",
    "Exclusion",
    "Exclusions",
    "Lease",
    "Ledger",
    "LedgerStatus",
    "LoaderProgress",
    "LoaderSpan",
    "Progress",
    "Session",
    "SkipRange",
    "Span",
    "Wait",
    "audit_epoch",
    "has_ledger",
    "open_ledger",
    "without_secrets",
]
