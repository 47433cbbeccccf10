"""What obstore raises becomes an error of the contract, with what an operator needs and nothing of a signature."""

from __future__ import annotations

import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
)

from penstock.errors import (
    AccessDenied,
    ConfigError,
    ObjectNotFound,
    PenstockError,
    PreconditionFailed,
    StorageError,
    TransientStoreError,
)
from penstock.storage.answers import RangeNotThere, translate

SIGNED = "<AWSAccessKeyId>AKIA7</AWSAccessKeyId><StringToSign>AWS4 secret stuff</StringToSign>"


def answered(status: int, code: str = "", kind: type[BaseError] = GenericError) -> BaseError:
    body = f"<Error><Code>{code}</Code>{SIGNED}</Error>" if code else ""
    return kind(
        f"Generic S3 error: Error performing GET http://h/b/k in 2ms - Server returned non-2xx status code: {status} "
        f"Words: {body}\n\nDebug source:\nGeneric {{ status: {status}, body: {body} }}"
    )


def failed(kind: str, more: str = "") -> GenericError:
    return GenericError(
        "Generic S3 error: HTTP error: error sending request\n\nDebug source:\n"
        f"Http(\n  HttpError {{\n    kind: {kind},\n    source: {more}\n"
    )


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (answered(500), TransientStoreError, "the store answered 500"),
        (answered(503, "SlowDown"), TransientStoreError, "503 SlowDown"),
        (answered(520), TransientStoreError, "520"),
        (answered(408), TransientStoreError, "408"),
        (answered(429), TransientStoreError, "429"),
        (answered(400, "RequestTimeout"), TransientStoreError, "400 RequestTimeout"),
        (answered(409, "ConditionalRequestConflict", AlreadyExistsError), TransientStoreError, "409"),
        (answered(401), AccessDenied, "401"),
        (answered(403, "AccessDenied", PermissionDeniedError), AccessDenied, "what they may do in this bucket"),
        (answered(403, "SignatureDoesNotMatch"), AccessDenied, "check the access key and its secret"),
        (answered(403, "RequestTimeTooSkewed"), AccessDenied, "clock is wrong"),
        (answered(400, "ExpiredToken"), AccessDenied, "get a new one"),
        (answered(404, "NoSuchKey"), ObjectNotFound, "does not exist"),
        (answered(404, "NoSuchBucket"), StorageError, "no such bucket"),
        (FileNotFoundError("Object at location k not found"), ObjectNotFound, "does not exist"),
        (answered(412, "PreconditionFailed", PreconditionError), PreconditionFailed, "not what was expected"),
        (answered(412, "PreconditionFailed", AlreadyExistsError), PreconditionFailed, "412"),
        (answered(416, "InvalidRange"), RangeNotThere, "behind the end"),
        (answered(400, "InvalidRequest"), StorageError, "400 InvalidRequest"),
        (failed("Timeout"), TransientStoreError, "no answer in time"),
        (failed("Connect", "ConnectionRefused"), TransientStoreError, "cannot be reached (connection refused)"),
        (failed("Interrupted"), TransientStoreError, "broke off"),
        (failed("Request"), TransientStoreError, "broke off"),
        (OSError("Generic S3 error: HTTP error: error sending request"), TransientStoreError, "connection failed"),
        (GenericError("Got invalid list response: unexpected end"), TransientStoreError, "answer is broken"),
        (GenericError("Error: PUT http://169.254.169.254/latest/api/token"), AccessDenied, "AWS_ACCESS_KEY_ID"),
        (GenericError("PUT http://169.254.169.254/ - status code: 503"), TransientStoreError, "credential service"),
        (NotSupportedError("nope"), StorageError, "cannot do that"),
        (ValueError("Could not parse path"), ConfigError, "cannot be a key"),
        (GenericError("something new: https://h/?sig=AKIA7"), StorageError, "something new: https://h/"),
    ],
)  # fmt: skip
def test_each_answer_has_its_error(error: Exception, kind: type[PenstockError], words: str) -> None:
    found = translate(error, "s3://b/k")
    assert type(found) is kind
    assert str(found).startswith("s3://b/k")
    assert words in str(found)
    assert "AKIA7" not in str(found)
    assert "secret stuff" not in str(found)
