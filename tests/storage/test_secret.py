"""A secret is in no repr, log, error, traceback or pickle; whoever connects gets it."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import traceback
from collections.abc import Callable

import pytest

from equipment.servers import S3Server
from penstock.errors import AccessDenied, ConfigError, PenstockError
from penstock.storage import EndpointStorage, ObjectStorage, open_storage
from penstock.storage.secret import Secret
from storage.conftest import MakeStore

VALUE = "s3cr3t-v4lue"


def told(error: BaseException) -> str:
    """All that a traceback can show, causes and the local values of our own code included."""
    found = traceback.TracebackException.from_exception(error, capture_locals=True)
    ours = [frame for frame in found.stack if "/penstock/" in frame.filename]
    assert ours
    shown = "".join(traceback.StackSummary.from_list(ours).format()) + str(error)
    shown += "".join(f"{name} = {value}" for frame in ours for name, value in (frame.locals or {}).items())
    while (cause := error.__cause__ or error.__context__) is not None:
        shown += repr(cause) + str(cause)
        error = cause
    return shown


def test_it_is_told_as_a_secret_and_revealed_on_demand() -> None:
    secret = Secret(VALUE)
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r:>20}", f"{[secret]}", "%s" % secret):  # noqa: UP031
        assert VALUE not in shown
        assert "secret" in shown
    assert secret.reveal() == VALUE
    assert secret == VALUE
    assert secret == Secret(VALUE)
    assert secret != "another"
    assert secret != 5
    assert len({secret, Secret(VALUE)}) == 1
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_a_value_is_copied_and_never_pickled_to_be_kept() -> None:
    secret = Secret(VALUE)
    assert copy.deepcopy([secret])[0] == copy.copy(secret) == VALUE
    with pytest.raises(ConfigError, match="environment variables") as caught:
        pickle.dumps(secret)
    assert VALUE not in str(caught.value)


def test_one_of_the_environment_is_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", VALUE)
    monkeypatch.setenv("MY_JSON", json.dumps({"keys": [{"secret": VALUE, "number": 5}]}))
    for secret in (Secret.from_environment("MY_KEY"), Secret.from_environment("MY_JSON", ("keys", 0, "secret"))):
        kept = pickle.dumps(secret)
        assert VALUE.encode() not in kept
        assert pickle.loads(kept).reveal() == VALUE  # noqa: S301 - ours
        assert VALUE not in repr(secret)
    assert repr(Secret.from_environment("MY_JSON", ("keys", 0, "secret"))) == "<secret from MY_JSON.keys[0].secret>"


@pytest.mark.parametrize("path", [(), ("keys", 1), ("keys", 0, "number"), ("other",), ("keys", "x")])
def test_one_that_is_not_there_is_told_by_name(monkeypatch: pytest.MonkeyPatch, path: tuple[str | int, ...]) -> None:
    if path:
        monkeypatch.setenv("MY_JSON", json.dumps({"keys": [{"secret": VALUE, "number": 5}]}))
    with pytest.raises(ConfigError, match="MY_JSON") as caught:
        Secret.from_environment("MY_JSON", path).reveal()
    assert VALUE not in told(caught.value)


# In a store

OPERATIONS: dict[str, Callable[[ObjectStorage], object]] = {
    "get": lambda store: store.get("object"),
    "head": lambda store: store.head("object"),
    "list": lambda store: list(store.list()),
    "put": lambda store: store.put("object", b"x"),
    "put large": lambda store: store.put("object", bytes(9 << 20)),
    "put_if_absent": lambda store: store.put_if_absent("object", b"x"),
    "exclusive": lambda store: store.exclusive("lock", purpose="testing").__enter__(),
    "endpoints": lambda store: EndpointStorage([store]).get("object"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_refused_request_tells_no_secret(
    make_store: MakeStore, operation: Callable[[ObjectStorage], object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        store = make_store(key="AKIA-known-key", secret=VALUE, session_token="t0ken-v4lue")
        with pytest.raises(AccessDenied) as caught:
            operation(store)
    for shown in (told(caught.value), caplog.text, repr(store), str(store), store.url, repr(vars(store))):
        for secret in (VALUE, "AKIA-known-key", "t0ken-v4lue"):
            assert secret not in shown


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", {"secret_access_key": VALUE}),
        ("s3://bucket", {"access_key_id": VALUE, "secret_access_key": VALUE, "no_such_option": VALUE}),
        ("s3://bucket", {"endpoint": f"https://user:{VALUE}@host", "access_key_id": "a", "secret_access_key": "b"}),
        ("s3://bucket", {"endpoint": f"ftp://host/?{VALUE}"}),
        (f"https://user:{VALUE}@host/folder", {}),
        (f"s3://key:{VALUE}@bucket/prefix", {}),
        (f"https://host/folder?sig={VALUE}", {}),
        ("gs://bucket", {"service_account_key": VALUE}),
        ("az://container", {"account_name": "me", "account_key": VALUE}),
    ],
)
def test_settings_that_cannot_work_tell_no_secret(url: str, options: dict[str, str]) -> None:
    def use() -> None:
        open_storage(url, options).get("object")

    with pytest.raises(PenstockError) as caught:
        use()
    said = str(caught.value) + "".join(str(cause) for cause in (caught.value.__cause__, caught.value.__context__))
    assert VALUE not in said


def test_a_store_is_pickled_without_what_was_given_as_a_value(make_store: MakeStore) -> None:
    with pytest.raises(ConfigError, match="environment variables"):
        pickle.dumps(make_store())
    with pytest.raises(ConfigError, match="environment variables"):
        pickle.dumps(EndpointStorage([make_store()]))


def test_a_pickled_store_holds_no_secret_of_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    store = open_storage("s3://data/kept")
    store.put("object", b"x")
    kept = pickle.dumps(store)
    assert s3.secret_key.encode() not in kept
    assert s3.access_key.encode() not in kept
    assert pickle.loads(kept).get("object") == b"x"  # noqa: S301 - ours
