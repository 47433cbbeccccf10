"""The guide to feeding is true: its Python runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent.parent / "docs" / "feeding.md"


def test_the_guide_s_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) > 5
    known: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), known)
    assert isinstance(known["state"], dict)
