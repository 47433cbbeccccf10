"""A value that nobody is to see: in no log, repr, error, traceback, and in no pickle that lies on a disk."""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

from penstock.errors import ConfigError


class Secret:
    """A password or a key. Told as ``<secret>``; `reveal` gives it out, which only whoever connects should ask for.

    One that stands in the environment is remembered by the variable's name and looked up when it is used, so that a
    pickle holds the name alone: a spawned process has the same environment. Any other is pickled only while a
    process is being spawned, when the pickle goes through a pipe and nowhere else.
    """

    __slots__ = ("_path", "_value", "_variable")

    def __init__(self, value: str) -> None:
        self._value: str | None = value
        self._variable = ""
        self._path: tuple[str | int, ...] = ()

    @classmethod
    def from_environment(cls, variable: str, path: tuple[str | int, ...] = ()) -> Secret:
        """The value of a variable; with a `path`, what stands there in the JSON that the variable holds."""
        secret = cls("")
        secret._value, secret._variable, secret._path = None, variable, path
        return secret

    def reveal(self) -> str:
        """The value itself."""
        if self._value is not None:
            return self._value
        found = _looked_up(self._variable, self._path)
        if found is None:
            raise ConfigError(f"{self._place()} is not set in this process: set it before the store is used")
        return found

    def _place(self) -> str:
        return self._variable + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self._path)

    def __repr__(self) -> str:
        return f"<secret from {self._place()}>" if self._variable else "<secret>"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Secret):
            return hmac.compare_digest(self.reveal().encode(), other.reveal().encode())
        return isinstance(other, str) and hmac.compare_digest(self.reveal().encode(), other.encode())

    def __hash__(self) -> int:
        return hash(self.reveal())

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._variable:
            return (Secret.from_environment, (self._variable, self._path))
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            raise ConfigError(
                "credentials that were given as values are not pickled, a pickle may be kept: give them by environment "
                "variables, or hand the store to a process as it is spawned"
            )
        return (Secret, (self._value,))


def _looked_up(variable: str, path: tuple[str | int, ...]) -> str | None:
    """What stands in the environment there, None where nothing or no text does. Raises nothing that could tell it."""
    found: Any = os.environ.get(variable)
    if not path or found is None:
        return found
    try:
        found = json.loads(found)
        for part in path:
            found = found[part]
    except (ValueError, TypeError, LookupError):
        return None
    return found if isinstance(found, str) else None
