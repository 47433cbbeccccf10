"""The least that reads an object: `http.client`, a connection a thread, an address that was signed before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit


def getter(task: dict[str, Any]) -> Callable[[str], int]:
    signed: dict[str, str] = task["signed"]
    mine = threading.local()

    def get(key: str) -> int:
        address = urlsplit(signed[key])
        connection = getattr(mine, "connection", None)
        if connection is None:
            connection = mine.connection = HTTPConnection(address.hostname or "", address.port)
        connection.request("GET", f"{address.path}?{address.query}")
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, answer.status
        return len(data)

    return get
