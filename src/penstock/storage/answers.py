"""What an object store answered, in the storage contract's words.

obstore raises few kinds of errors and tells the rest in their text: the status, the store's own code, how the
connection failed. That text may also hold what a server sent back of a request's signature, so no more is passed on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.errors import (
    AccessDenied,
    ConfigError,
    ObjectNotFound,
    PenstockError,
    PreconditionFailed,
    StorageError,
    TransientStoreError,
)
from penstock.storage.web import redacted

_STATUS = re.compile(r"status code: (\d{3})|\bstatus: (\d{3}),")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
REFUSED_CODES = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
_TRANSIENT_CODES = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown"}
_METADATA_SERVICE = "http://169.254.169.254/"
"""Where a cloud's machine finds credentials of its own, asked when none were given."""
_KINDS = {
    "Connect": "cannot be reached",
    "Decode": "the answer is broken",
    "Interrupted": "the connection broke off",
    "Request": "the connection broke off",
    "Timeout": "no answer in time",
    "Unknown": "the connection failed",
}


class RangeNotThere(StorageError):
    """A range that begins behind the end of its object; never leaves this package."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What obstore's error tells."""

    name: str
    status: int
    code: str
    text: str

    @property
    def told(self) -> str:
        return f"{self.status or ''} {self.code}".strip() or self.name


def translate(error: Exception, what: str) -> PenstockError:
    """The error of the contract for one of obstore's. Raise it outside the ``except`` block: its cause stays behind."""
    if isinstance(error, ValueError):
        return ConfigError(f"{what}: this cannot be a key of an object store: expected no control characters")
    text = str(error)
    name = "FileNotFoundError" if isinstance(error, FileNotFoundError) else type(error).__name__
    return _meant(_Answer(name, _status(text), code_in(text), text), what)


def answered(status: int, code: str, what: str, retry_after_s: float | None = None) -> PenstockError:
    """The error of the contract for a status and the store's own code."""
    failure = _meant(_Answer("", status, code, ""), what)
    if isinstance(failure, TransientStoreError):
        failure.retry_after_s = retry_after_s
    return failure


def code_in(text: str) -> str:
    """The store's own code in what it answered; empty where there is none."""
    found = _CODE.search(text)
    return found[1] if found else ""


def _meant(answer: _Answer, what: str) -> PenstockError:
    for meaning in (_refused, _absent, _passing, _unmet):
        failure = meaning(answer, what)
        if failure is not None:
            return failure
    return _without_answer(answer, what)


def _refused(answer: _Answer, what: str) -> PenstockError | None:
    if _METADATA_SERVICE in answer.text:
        if answer.status == 429 or answer.status >= 500 or "kind: Interrupted" in answer.text:
            return TransientStoreError(f"{what}: this machine's credential service answered {answer.told}")
        return AccessDenied(
            f"{what}: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the provider's "
            "own), or the option skip_signature for a public bucket"
        )
    is_refused = answer.name in ("PermissionDeniedError", "UnauthenticatedError") or answer.status in (401, 403)
    if is_refused or answer.code in REFUSED_CODES:
        return AccessDenied(f"{what}: the store refused ({answer.told}): {_advice(answer.code)}")
    return None


def _absent(answer: _Answer, what: str) -> PenstockError | None:
    if answer.code == "NoSuchBucket":
        return StorageError(f"{what}: there is no such bucket ({answer.told}): check its name and the endpoint")
    if answer.name == "FileNotFoundError" or answer.status in (404, 410):
        return ObjectNotFound(f"{what} does not exist ({answer.told})")
    return None


def _passing(answer: _Answer, what: str) -> PenstockError | None:
    if answer.code in _TRANSIENT_CODES or answer.status in (408, 425, 429) or answer.status >= 500:
        return TransientStoreError(f"{what}: the store answered {answer.told}")
    return None


def _unmet(answer: _Answer, what: str) -> PenstockError | None:
    if answer.name in ("AlreadyExistsError", "PreconditionError") or answer.status in (409, 412):
        return PreconditionFailed(f"{what}: what is there is not what was expected ({answer.told})")
    if answer.status == 416:
        return RangeNotThere(f"{what}: the range begins behind the end")
    return None


def _without_answer(answer: _Answer, what: str) -> PenstockError:
    """The rest: no answer at all, or one that says nothing of use."""
    text = answer.text
    kind = found[1] if (found := _KIND.search(text)) else ""
    if kind in _KINDS:
        refused = " (connection refused)" if "ConnectionRefused" in text else ""
        return TransientStoreError(f"{what}: {_KINDS[kind]}{refused}")
    if "HTTP error" in text:  # all that is told of a part
        return TransientStoreError(f"{what}: the connection failed")
    if "response" in text and "invalid" in text.lower():
        return TransientStoreError(f"{what}: the answer is broken")
    if answer.name == "NotSupportedError":
        return StorageError(f"{what}: this store cannot do that")
    told = answer.told if answer.status or answer.code else redacted(text.partition("\n")[0])[:200]
    return StorageError(f"{what}: {told}")


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1] or found[2]) if found else 0


def _advice(code: str) -> str:
    if code == "RequestTimeTooSkewed":
        return "this machine's clock is wrong: set it"
    if code in ("ExpiredToken", "InvalidToken"):
        return "the session token is no longer good: get a new one"
    if code in ("SignatureDoesNotMatch", "InvalidAccessKeyId"):
        return "the credentials are wrong: check the access key and its secret, and that they are this endpoint's"
    return "check the credentials and what they may do in this bucket"
