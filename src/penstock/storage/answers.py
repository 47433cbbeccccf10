"""What an object store answered, in the storage contract's words.

obstore raises few kinds of errors and tells the rest in their text: the status, the store's own code, how the connection
failed. That text may also hold what a server sent back of a request's signature, so none of it is passed on but these.
"""

from __future__ import annotations

import re

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
_REFUSED_CODES = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
_TRANSIENT_CODES = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown"}
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


def translate(error: Exception, what: str) -> PenstockError:
    """The error of the contract for one of obstore's. Raise it outside the ``except`` block: its cause stays behind."""
    text = str(error)
    status = _status(text)
    code = found[1] if (found := _CODE.search(text)) else ""
    answer = f"{status} {code}".strip() if status else code
    name = type(error).__name__
    if isinstance(error, ValueError):
        return ConfigError(f"{what}: this cannot be a key of an object store: expected no control characters")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403) or code in _REFUSED_CODES:
        return AccessDenied(f"{what}: the store refused ({answer or name}): {_advice(code)}")
    if code == "NoSuchBucket":
        return StorageError(f"{what}: there is no such bucket ({answer}): check its name and the endpoint")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return ObjectNotFound(f"{what} does not exist" + (f" ({answer})" if answer else ""))
    if code in _TRANSIENT_CODES or status in (408, 425, 429) or status >= 500:
        return TransientStoreError(f"{what}: the store answered {answer}")
    if name in ("AlreadyExistsError", "PreconditionError") or status in (409, 412):
        return PreconditionFailed(f"{what}: what is there is not what was expected ({answer or name})")
    if status == 416:
        return RangeNotThere(f"{what}: the range begins behind the end")
    return _without_answer(text, what, answer, name)


def _without_answer(text: str, what: str, answer: str, name: str) -> PenstockError:
    """The rest: no answer at all, or one that says nothing of use."""
    kind = found[1] if (found := _KIND.search(text)) else ""
    if "169.254." in text or "credential" in text.lower():
        return AccessDenied(
            f"{what}: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the provider's "
            "own), or the option skip_signature for a public bucket"
        )
    if kind in _KINDS:
        refused = " (connection refused)" if "ConnectionRefused" in text else ""
        return TransientStoreError(f"{what}: {_KINDS[kind]}{refused}")
    if "response" in text and "invalid" in text.lower():
        return TransientStoreError(f"{what}: the answer is broken")
    if name == "NotSupportedError":
        return StorageError(f"{what}: this store cannot do that")
    first = redacted(text.partition("\n")[0])[:200]
    return StorageError(f"{what}: {answer or first}")


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
