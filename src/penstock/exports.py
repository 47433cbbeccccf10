"""Names of a package that open on first use: importing it costs nothing that is not used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def opening_lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A package's ``__getattr__``.

    Args:
        package: Its name.
        homes: The module, below the package, that each exported name lives in.
    """

    def open_name(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return open_name
