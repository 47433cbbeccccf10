"""The proof of an epoch: the ledger's spans held against the data set's manifest."""

from __future__ import annotations

from penstock.blocks import BlockStore, Manifest
from penstock.errors import BlockStoreError, LedgerMismatch
from penstock.ledger import EpochAudit, audit_epoch
from penstock.observe.run_folder import RunFolder


def prove(run: RunFolder, dataset_file: str | None = None) -> list[EpochAudit]:
    """Audit every epoch of a run, the current one last. Reads the manifest anew and asks no counters.

    Args:
        run: The run.
        dataset_file: Where its data set is now, if not where it was.
    """
    status = run.ledger.status()
    manifest = manifest_of(run, dataset_file)
    if run.settings.get("plan") == "strided":
        from penstock.observe.strided import StridedRun

        return StridedRun(run, dataset_file).prove(manifest.total_samples)
    samples = [block.sample_count for block in manifest.blocks]
    journal = run.ledger.exclusions()
    return [
        audit_epoch(epoch, run.ledger.spans(epoch), samples, status.chunk_size, journal)
        for epoch in range(status.epoch + 1)
    ]


def manifest_of(run: RunFolder, dataset_file: str | None = None) -> Manifest:
    """The manifest of the data set a run was trained on, and of no other."""
    where = dataset_file or run.settings["dataset_file"]
    try:
        manifest = BlockStore.open(where).manifest
    except BlockStoreError as error:
        raise BlockStoreError(
            f"the data set of {run.path} cannot be read: {error}: if it was moved, name it with --dataset-file"
        ) from error
    expected = run.ledger.status().dataset_id
    if manifest.header.dataset_id != expected:
        raise LedgerMismatch(
            f"{run.path} belongs to other data than {where} holds: "
            f"dataset_id {expected}, found {manifest.header.dataset_id}"
        )
    return manifest
