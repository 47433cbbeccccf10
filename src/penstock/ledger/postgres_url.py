"""The URL of a ledger in PostgreSQL: ``postgresql://user:password@host:port/database?run=name``.

Everything but `run` goes to libpq as it is, so its environment (PGPASSWORD, PGSERVICE, ...) and its password file work
as everywhere. A run is a schema of its own in the database (`penstock_<run>`): several runs share a database, and
dropping a schema drops a run.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from penstock.errors import ConfigError

SCHEMES = ("postgresql", "postgres")
_SECRET = ("password", "sslpassword", "sslkey", "passfile", "oauth_client_secret", "scram_client_key")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,49}")
_EXPECTED = (
    "expected postgresql://user@host:port/database?run=name, special characters as %XX, and run of up to 50 letters, "
    "digits, _ and -"
)


def is_postgres(url: str) -> bool:
    return url.split("://", maxsplit=1)[0] in SCHEMES and "://" in url


def split_run(url: str) -> tuple[str, str]:
    """The URL as libpq takes it, and the run's name."""
    parts = _parts(url)
    if parts is None:  # without a word of it: what cannot be understood may be a part of the password
        raise ConfigError(f"the ledger's URL cannot be understood: {_EXPECTED}")
    options = parse_qsl(parts.query, keep_blank_values=True)
    runs = [value for name, value in options if name == "run"]
    if len(runs) != 1 or not _RUN.fullmatch(runs[0]):
        raise ConfigError(f"ledger {redacted(url)} names no run: {_EXPECTED}")
    return _joined(parts, parts.netloc, [(name, value) for name, value in options if name != "run"]), runs[0]


def redacted(url: str) -> str:
    """The URL without its secrets: it can be told, saved, and used where libpq finds the password by itself."""
    parts = _parts(url)
    if parts is None:
        return "postgresql://..."
    user, at, host = parts.netloc.rpartition("@")
    options = parse_qsl(parts.query, keep_blank_values=True)
    told = [(name, value) for name, value in options if name not in _SECRET]
    return _joined(parts, user.split(":", maxsplit=1)[0] + at + host, told)


def secrets(url: str) -> list[str]:
    """What must not be told, as it stands in the URL and as it is meant."""
    parts = _parts(url)
    if parts is None:
        return []
    found = [value for name, value in parse_qsl(parts.query, keep_blank_values=True) if name in _SECRET]
    found.append(parts.netloc.rpartition("@")[0].partition(":")[2])
    return [secret for value in found if value for secret in {value, unquote(value)}]


def _parts(url: str) -> SplitResult | None:
    """The parts of a URL, or None where a character that should stand as %XX has cut it in wrong places."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        ports = [host.rpartition(":")[2] for host in hosts if ":" in host.rpartition("]")[2]]
    except ValueError:
        return None
    if any(port and not port.isdecimal() for port in ports) or "@" in parts.path + parts.query + parts.fragment:
        return None
    return parts


def _joined(parts: SplitResult, netloc: str, options: list[tuple[str, str]]) -> str:
    query = urlencode(options, quote_via=quote, safe="/")
    return f"{parts.scheme}://{netloc}{parts.path}" + (f"?{query}" if query else "")
