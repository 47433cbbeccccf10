"""Lets failed assertions of the shared suite tell their values, as those of test modules do."""

import pytest

_SUITE = ("claiming", "commits", "concurrency", "epochs", "fencing", "identity", "progress", "restoring", "steps")
pytest.register_assert_rewrite(*(f"ledger.{name}" for name in (*_SUITE, "model")))
