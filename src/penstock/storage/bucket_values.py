"""Where the values of a bucket stand in the environment, and what is wrong with them; the values themselves stay there.

What is read here lives in functions that raise nothing, so that no traceback can show it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from penstock.storage.secret import Secret

Purpose = Literal["read", "write"]
COMMON_ENDPOINT = "R2_ENDPOINT_URL"
_MISSING = object()
_BROKEN = object()

_VARIABLES = {"account_id": "ACCOUNT_ID", "endpoint_url": "ENDPOINT_URL", "name": "BUCKET_NAME"}
_SPELLINGS = {"name": ("name", "bucket_name"), "endpoint_url": ("endpoint_url", "endpoint")}
_SHAPES = {
    "account_id": (re.compile(r"[A-Za-z0-9-]{1,64}"), "an account (letters and digits)"),
    "endpoint_url": (re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?"), "a URL such as https://s3.example.com"),
    "name": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]"), "a bucket's name (3 to 63 letters, digits, -)"),
    "key": (re.compile(r"[!-~]{1,1024}"), "a key (no spaces, no line breaks)"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one bucket is described: in variables of its own, or at a place in a variable's JSON."""

    variable: str
    """The JSON variable, or what the variables' names begin with."""
    path: tuple[str | int, ...] = ()
    is_json: bool = True

    def label(self, field: str) -> str:
        """What a user knows a field by."""
        if self.is_json:
            places = (*self.path, *_json_places(field)[0])
            return self.variable + "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in places)
        return f"{self.variable}_{_VARIABLES.get(field) or field.replace('.', '_').upper()}"

    def secret(self, field: str) -> Secret | None:
        """A field's value, to be looked up where it is used; None where there is none."""
        if not self.is_json:
            found = self.label(field)
            return Secret.from_environment(found) if os.environ.get(found) else None
        for places in _json_places(field):
            path = (*self.path, *places)
            if look_up(self.variable, path) not in (_MISSING, _BROKEN):
                return Secret.from_environment(self.variable, path)
        return None

    def problem(self, field: str) -> str | None:
        """What is wrong with a field, in words that tell nothing of it; None where it is good."""
        shape, expected = _SHAPES.get(field, _SHAPES["key"])
        if self.is_json:
            found = [look_up(self.variable, (*self.path, *places)) for places in _json_places(field)]
            value = next((each for each in found if each is not _MISSING), _MISSING)
        else:
            value = os.environ.get(self.label(field)) or _MISSING
        if value is _MISSING:
            return f"{self.label(field)} is not set"
        if not isinstance(value, str) or not shape.fullmatch(value):
            return f"{self.label(field)} is not {expected}"
        return None


def problems_of(entry: Entry, purpose: Purpose | None) -> list[str]:
    """All that keeps a bucket from being used for a purpose; None asks only where it is."""
    problems = [entry.problem("name")]
    if entry.secret("endpoint_url") is not None:
        problems.append(entry.problem("endpoint_url"))
    elif entry.secret("account_id") is not None:
        problems.append(entry.problem("account_id"))
    elif os.environ.get(COMMON_ENDPOINT):
        problems.append(Entry("R2", is_json=False).problem("endpoint_url"))
    else:
        ways = (entry.label("account_id"), entry.label("endpoint_url"), COMMON_ENDPOINT)
        problems.append(f"{ways[0]} is not set (nor {ways[1]}, nor {ways[2]})")
    if purpose is not None:
        problems += [entry.problem(f"{purpose}.{part}") for part in ("access_key_id", "secret_access_key")]
    return [problem for problem in problems if problem]


def look_up(variable: str, path: tuple[str | int, ...]) -> Any:
    """What stands at a place in a variable's JSON, or one of two marks: nothing does, or it cannot be read."""
    text = os.environ.get(variable)
    if not text:
        return _MISSING
    try:
        found: Any = json.loads(text)
    except ValueError:
        return _BROKEN
    for part in path:
        if not isinstance(found, list if isinstance(part, int) else dict):
            return _MISSING
        try:
            found = cast(Any, found)[part]
        except LookupError:
            return _MISSING
    return found


def json_problem(variable: str, expected: type) -> str | None:
    """What is wrong with a JSON variable as a whole; None where it is good or not set."""
    text = os.environ.get(variable)
    if not text:
        return None
    wanted = {dict: "a JSON object", list: "a JSON array"}[expected]
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{variable} is not {wanted} (broken at line {error.lineno}, column {error.colno})"
    except ValueError:
        return f"{variable} is not {wanted}"
    if not isinstance(found, expected) or not found:
        return f"{variable} is not {wanted} with something in it"
    return None


def count_at(variable: str, path: tuple[str | int, ...]) -> int | None:
    """How many entries an array has there; None where there is no array."""
    found = look_up(variable, path)
    return len(found) if isinstance(found, list) else None


def is_there(variable: str, path: tuple[str | int, ...]) -> bool:
    """Whether anything can be read at a place in a variable's JSON."""
    return look_up(variable, path) not in (_MISSING, _BROKEN)


def _json_places(field: str) -> list[tuple[str, ...]]:
    purpose, dot, part = field.partition(".")
    if dot:
        return [("credentials", purpose, part)]
    return [(spelling,) for spelling in _SPELLINGS.get(field, (field,))]
