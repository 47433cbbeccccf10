"""The proof of an epoch: the ledger's spans held against the data set's manifest."""

from __future__ import annotations

from penstock.blocks import BlockStore
from penstock.errors import LedgerMismatch
from penstock.ledger import EpochAudit, audit_epoch
from penstock.observe.run_folder import RunFolder


def prove(run: RunFolder) -> list[EpochAudit]:
    """Audit every epoch of a run, the current one last. Reads the manifest anew and asks no counters."""
    status = run.ledger.status()
    manifest = BlockStore.open(run.settings["dataset_file"]).manifest
    if manifest.header.dataset_id != status.dataset_id:
        raise LedgerMismatch(
            f"{run.path} belongs to other data than {run.settings['dataset_file']} holds now: dataset_id "
            f"{status.dataset_id}, found {manifest.header.dataset_id}"
        )
    samples = [block.sample_count for block in manifest.blocks]
    return [
        audit_epoch(epoch, run.ledger.spans(epoch), samples, status.chunk_size) for epoch in range(status.epoch + 1)
    ]
