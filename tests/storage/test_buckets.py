"""Buckets come from the environment; what is missing or wrong is told at once, by name, without a value."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping

import pytest

import penstock
from equipment.servers import S3Server
from penstock.errors import AccessDenied, ConfigError
from penstock.storage import EndpointStorage, ObjectStorage
from penstock.storage.buckets import BUCKETS, Bucket
from storage.conftest import MakeStore
from storage.test_secret import told

pytestmark = pytest.mark.alone

ACCOUNT = "0123456789abcdef0123456789abcdef"


def variables(bucket: str, **changed: str | None) -> dict[str, str]:
    """A bucket's variables, with some changed or left out."""
    begins = f"R2_{bucket.upper()}_"
    values: dict[str, str | None] = {
        "ACCOUNT_ID": ACCOUNT,
        "BUCKET_NAME": f"{bucket}-bucket",
        "READ_ACCESS_KEY_ID": f"{bucket}-read-key",
        "READ_SECRET_ACCESS_KEY": f"{bucket}-read-v4lue",
        "WRITE_ACCESS_KEY_ID": f"{bucket}-write-key",
        "WRITE_SECRET_ACCESS_KEY": f"{bucket}-write-v4lue",
        **changed,
    }
    return {begins + name: value for name, value in values.items() if value is not None}


def entry(name: str, key: str = "reader", url: str | None = None, **changed: object) -> dict[str, object]:
    """A bucket as it stands in JSON."""
    place = {"endpoint_url": url} if url else {"account_id": ACCOUNT}
    return {
        **place,
        "name": name,
        "credentials": {
            "read": {"access_key_id": key, "secret_access_key": f"{key}-secret"},
            "write": {"access_key_id": "writer", "secret_access_key": "writer-secret"},
        },
        **changed,
    }


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("R2_") or name == "BUCKET_SECRETS"]:
        monkeypatch.delenv(name)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        environment.setenv(name, value)


# The seed's shape


@pytest.mark.parametrize("bucket", BUCKETS)
def test_each_bucket_is_made_of_its_variables(environment: pytest.MonkeyPatch, bucket: str) -> None:
    set_all(environment, variables(bucket))
    found = penstock.load_bucket_secrets()[bucket]
    assert found["account_id"] == ACCOUNT
    assert found["name"] == found["bucket_name"] == f"{bucket}-bucket"
    for purpose in ("read", "write"):
        credentials = found["credentials"][purpose]
        assert dict(credentials) == {
            "access_key_id": f"{bucket}-{purpose}-key",
            "secret_access_key": f"{bucket}-{purpose}-v4lue",
        }
        store = found.storage(purpose)
        assert isinstance(store, ObjectStorage)
        assert store.url == f"s3://{bucket}-bucket"
        assert store.address.endpoint == f"https://{ACCOUNT}.r2.cloudflarestorage.com"
        assert dict(store.address.options)["region"] == "auto"
        assert dict(store.address.options)["access_key_id"] == f"{bucket}-{purpose}-key"
    assert penstock.load_bucket_secrets()[bucket].storage("read", "folder/").url == f"s3://{bucket}-bucket/folder"


def test_there_are_four_buckets_and_no_others(environment: pytest.MonkeyPatch) -> None:
    assert list(penstock.load_bucket_secrets()) == ["gradients", "aggregator", "dataset", "checkpoints"]
    with pytest.raises(KeyError, match="expected one of gradients, aggregator, dataset, checkpoints"):
        penstock.load_bucket_secrets()["datasets"]
    set_all(environment, variables("dataset"))
    with pytest.raises(KeyError, match="expected one of account_id"):
        penstock.load_bucket_secrets()["dataset"]["accounts"]


def test_several_data_set_buckets_come_as_a_list(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, variables("dataset"))  # which the list goes before
    environment.setenv("R2_DATASET_BUCKET_LIST", json.dumps([entry("bucket-a"), entry("bucket-b", "other")]))
    found = penstock.load_bucket_secrets()["dataset"]
    assert list(found) == ["multiple"]
    assert [each["name"] for each in found["multiple"]] == ["bucket-a", "bucket-b"]
    assert found["multiple"][1]["credentials"]["read"]["access_key_id"] == "other"
    assert isinstance(found.storage(), EndpointStorage)
    assert found.storage().url == "s3://bucket-a | s3://bucket-b"
    assert found["multiple"][1].storage("write").url == "s3://bucket-b"
    with pytest.raises(ConfigError, match="write to each of them"):
        found.storage("write")


def test_all_of_it_may_be_one_json(environment: pytest.MonkeyPatch) -> None:
    whole = {
        "gradients": entry("grads"),
        "aggregator": {**entry("unused"), "name": "other", "bucket_name": "other"},
        "dataset": {"multiple": [entry("bucket-a"), entry("bucket-b")]},
    }
    environment.setenv("BUCKET_SECRETS", json.dumps(whole))
    set_all(environment, variables("checkpoints"))
    found = penstock.load_bucket_secrets()
    assert found["gradients"]["name"] == "grads"
    assert found["gradients"]["account_id"] == ACCOUNT
    assert [each["name"] for each in found["dataset"]["multiple"]] == ["bucket-a", "bucket-b"]
    assert found["checkpoints"]["name"] == "checkpoints-bucket"
    found.check()


# What is missing or wrong


def problems(error: ConfigError) -> list[str]:
    return [line.strip() for line in str(error).splitlines()[1:]]


def test_nothing_is_wrong_before_a_bucket_is_used(environment: pytest.MonkeyPatch) -> None:
    found = penstock.load_bucket_secrets()
    assert "dataset" in found
    assert "Bucket" in repr(found["dataset"])


def test_all_that_is_missing_is_told_at_once(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set or mend") as caught:
        penstock.load_bucket_secrets()["dataset"].storage("read")
    assert problems(caught.value) == [
        "R2_DATASET_BUCKET_NAME is not set",
        "R2_DATASET_ACCOUNT_ID is not set (nor R2_DATASET_ENDPOINT_URL, nor R2_ENDPOINT_URL)",
        "R2_DATASET_READ_ACCESS_KEY_ID is not set",
        "R2_DATASET_READ_SECRET_ACCESS_KEY is not set",
    ]
    with pytest.raises(ConfigError) as caught:
        penstock.load_bucket_secrets().check()
    assert len(problems(caught.value)) == 4 * 6


def test_who_only_reads_needs_no_keys_to_write(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, variables("dataset", WRITE_ACCESS_KEY_ID=None, WRITE_SECRET_ACCESS_KEY=""))
    found = penstock.load_bucket_secrets()
    found["dataset"].storage("read")
    found.check({"dataset": ("read",)})
    missing = ["R2_DATASET_WRITE_ACCESS_KEY_ID is not set", "R2_DATASET_WRITE_SECRET_ACCESS_KEY is not set"]
    for use in (
        lambda: found["dataset"].storage("write"),
        lambda: found["dataset"]["credentials"]["write"]["access_key_id"],
        lambda: found.check({"dataset": ("read", "write")}),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        assert problems(caught.value) == missing


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("BUCKET_NAME", "no v4lue name", "is not a bucket's name"),
        ("BUCKET_NAME", "x", "is not a bucket's name"),
        ("ACCOUNT_ID", "https://v4lue", "is not an account"),
        ("READ_ACCESS_KEY_ID", "v4lue with spaces", "is not a key"),
        ("READ_SECRET_ACCESS_KEY", "v4lue\n", "is not a key"),
        ("ENDPOINT_URL", "v4lue.example.com", "is not a URL"),
        ("ENDPOINT_URL", "https://user:v4lue@host", "is not a URL"),
    ],
)
def test_what_is_malformed_is_told_by_name_without_its_value(
    environment: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    set_all(environment, {**variables("dataset"), f"R2_DATASET_{name}": value})
    with pytest.raises(ConfigError, match=f"R2_DATASET_{name} {problem}") as caught:
        penstock.load_bucket_secrets()["dataset"].storage("read")
    assert len(problems(caught.value)) == 1
    assert "v4lue" not in told(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("R2_DATASET_BUCKET_LIST", '[{"v4lue": 5', " is not a JSON array (broken at line 1, column 13)"),
        ("R2_DATASET_BUCKET_LIST", '{"v4lue": 5}', " is not a JSON array with something in it"),
        ("R2_DATASET_BUCKET_LIST", "[]", " is not a JSON array with something in it"),
        ("BUCKET_SECRETS", "v4lue", " is not a JSON object (broken at line 1, column 1)"),
        (
            "BUCKET_SECRETS",
            '{"dataset": {"multiple": "v4lue"}}',
            ".dataset.multiple is not a JSON array with something in it",
        ),
    ],
)
def test_json_that_is_none_is_told(environment: pytest.MonkeyPatch, variable: str, value: str, problem: str) -> None:
    environment.setenv(variable, value)
    found = penstock.load_bucket_secrets()["dataset"]
    for use in (lambda: found.storage("read"), lambda: [found[field] for field in found]):
        with pytest.raises(ConfigError) as caught:
            use()
        assert problems(caught.value) == [variable + problem]
        assert "v4lue" not in told(caught.value)


def test_places_in_json_are_told_by_their_path(environment: pytest.MonkeyPatch) -> None:
    bad = {"name": 5, "credentials": {"read": {"access_key_id": "v4lue with spaces"}}}
    environment.setenv("R2_DATASET_BUCKET_LIST", json.dumps([entry("bucket-a"), bad, "v4lue"]))
    with pytest.raises(ConfigError) as caught:
        penstock.load_bucket_secrets()["dataset"].storage("read")
    place = "R2_DATASET_BUCKET_LIST"
    assert problems(caught.value)[:4] == [
        f"{place}[1].name is not a bucket's name (3 to 63 letters, digits, -)",
        f"{place}[1].account_id is not set (nor {place}[1].endpoint_url, nor R2_ENDPOINT_URL)",
        f"{place}[1].credentials.read.access_key_id is not a key (no spaces, no line breaks)",
        f"{place}[1].credentials.read.secret_access_key is not set",
    ]
    assert len(problems(caught.value)) == 8
    assert "v4lue" not in told(caught.value)


def test_two_ways_to_say_it_are_one_too_many(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BUCKET_SECRETS", json.dumps({"dataset": entry("bucket-a")}))
    environment.setenv("R2_DATASET_BUCKET_NAME", "bucket-b")
    with pytest.raises(ConfigError, match=r"BUCKET_SECRETS.dataset and R2_DATASET_BUCKET_NAME are both set"):
        penstock.load_bucket_secrets()["dataset"].storage("read")


def test_a_purpose_that_is_none_is_refused(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, variables("dataset"))
    with pytest.raises(ConfigError, match="read or write: got 'admin'"):
        penstock.load_bucket_secrets()["dataset"].storage("admin")  # pyright: ignore[reportArgumentType]


def test_no_value_is_shown_or_pickled(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, variables("dataset"))
    found = penstock.load_bucket_secrets()
    store = found["dataset"].storage("read")
    shown = [found, found["dataset"], dict(found), found["dataset"]["credentials"], store, vars(store)]
    shown.append(dict(found["dataset"]["credentials"]["read"]))
    for each in shown:
        assert "v4lue" not in repr(each)
        assert "read-key" not in repr(each)
        assert ACCOUNT not in repr(each)
    for each in (found, found["dataset"], store):
        kept = pickle.dumps(each)
        assert b"v4lue" not in kept
        assert b"read-key" not in kept
    assert isinstance(pickle.loads(pickle.dumps(found))["dataset"], Bucket)  # noqa: S301 - ours


# Used


def test_buckets_of_any_s3_endpoint_are_read_and_written_with_their_own_keys(
    environment: pytest.MonkeyPatch, s3: S3Server, make_store: MakeStore, place: str
) -> None:
    make_store().put("object", b"data")
    keys = {"READ_ACCESS_KEY_ID": "reader", "READ_SECRET_ACCESS_KEY": "reader-secret"}
    keys |= {"WRITE_ACCESS_KEY_ID": "writer", "WRITE_SECRET_ACCESS_KEY": "writer-secret"}
    set_all(environment, variables("gradients", ACCOUNT_ID=None, ENDPOINT_URL=s3.url, BUCKET_NAME="data", **keys))
    found = penstock.load_bucket_secrets()["gradients"]
    reading, writing = found.storage("read", place), found.storage("write", place)
    assert isinstance(reading, ObjectStorage)
    assert isinstance(writing, ObjectStorage)
    assert reading.get("object") == b"data"
    with pytest.raises(AccessDenied):
        reading.put("object", b"x")
    writing.put("object", b"new")
    assert reading.get("object") == b"new"
    environment.delenv("R2_GRADIENTS_ENDPOINT_URL")
    environment.setenv("R2_ENDPOINT_URL", s3.url)
    assert found["endpoint_url"] == s3.url
    assert found.storage("read", place).get("object") == b"new"


def test_several_buckets_are_read_in_turn_each_with_its_own_key(
    environment: pytest.MonkeyPatch, s3: S3Server, make_store: MakeStore, place: str
) -> None:
    for bucket in ("data", "elsewhere"):
        make_store(bucket=bucket).put("object", b"data")
    listed = [entry("data", "reader", s3.url), entry("elsewhere", "stranger", s3.url)]
    environment.setenv("R2_DATASET_BUCKET_LIST", json.dumps(listed))
    store = penstock.load_bucket_secrets()["dataset"].storage("read", place)
    assert isinstance(store, EndpointStorage)
    again = pickle.loads(pickle.dumps(store))  # noqa: S301 - ours
    for each in (store, again):
        assert {each.get("object") for _ in range(4)} == {b"data"}
        assert [health.failures for health in each.health()] == [0, 0]
        assert [health.requests for health in each.health()] == [2, 2]
