"""Hooks that remember what happened, or do something when it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recorder:
    """Keeps every event; `when` calls an action at the nth event of a kind."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._actions: list[tuple[str, int, Callable[[dict[str, Any]], None]]] = []

    def when(self, kind: str, nth: int, action: Callable[[dict[str, Any]], None]) -> Recorder:
        self._actions.append((kind, nth, action))
        return self

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        for kind, nth, action in self._actions:
            if event["event"] == kind and len(self.of(kind)) == nth:
                action(event)
