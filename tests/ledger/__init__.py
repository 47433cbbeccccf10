import pytest

_BEHAVIOURS = ("claiming", "commits", "concurrency", "epochs", "fencing", "identity", "progress", "restoring", "steps")
pytest.register_assert_rewrite(*(f"ledger.{name}" for name in (*_BEHAVIOURS, "model")))
