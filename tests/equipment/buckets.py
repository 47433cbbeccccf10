"""Who may do what on the tests' S3 server, and how to be one of them."""

from __future__ import annotations

import pytest

from penstock.storage.retry import Budgets, RetryBudget

KEYS = {
    "reader": ["Read:data", "List:data"],
    "writer": ["Read:data", "List:data", "Write:data"],
    "stranger": ["Read:elsewhere", "List:elsewhere"],
}
QUICK = RetryBudget(attempts=12, deadline_s=60.0, first_wait_s=0.01, longest_wait_s=0.05)
PATIENT = Budgets(metadata=QUICK, data=QUICK, writes=QUICK)
"""Many tries, short waits."""


def use_key(environment: pytest.MonkeyPatch, key: str, endpoint: str) -> None:
    """Have everything go to an endpoint with one of the server's keys, as a user would."""
    environment.setenv("AWS_ACCESS_KEY_ID", key)
    environment.setenv("AWS_SECRET_ACCESS_KEY", f"{key}-secret")
    environment.setenv("AWS_ENDPOINT_URL", endpoint)
    environment.setenv("AWS_REGION", "us-east-1")
