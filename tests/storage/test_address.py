"""Where a store is, by URL and options; told without what opens it."""

from __future__ import annotations

import pickle

import pytest

from penstock.errors import ConfigError
from penstock.storage import ObjectStorage, open_storage
from penstock.storage.address import StoreAddress, parse_address

ACCOUNT = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "prefix", "told"),
    [
        ("s3://bucket", "s3", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "s3", "bucket", "", "s3://bucket"),
        ("s3://bucket/a/b/", "s3", "bucket", "a/b", "s3://bucket/a/b"),
        ("s3a://bucket/a", "s3", "bucket", "a", "s3://bucket/a"),
        ("s3://bucket/with%20space", "s3", "bucket", "with space", "s3://bucket/with space"),
        ("gs://bucket/a", "gs", "bucket", "a", "gs://bucket/a"),
        ("az://container/a", "az", "container", "a", "az://container/a"),
        ("https://host/a/b", "http", "https://host/a/b", "", "https://host/a/b"),
        ("http://host:80", "http", "http://host:80", "", "http://host:80"),
        (f"https://{ACCOUNT}.r2.cloudflarestorage.com/bucket/a", "s3", "bucket", "a", "s3://bucket/a"),
    ],
)
def test_a_url_says_where(url: str, scheme: str, bucket: str, prefix: str, told: str) -> None:
    storage = open_storage(url)
    assert isinstance(storage, ObjectStorage)
    address = storage.address
    assert (address.scheme, address.bucket, address.prefix) == (scheme, bucket, prefix)
    assert storage.url == told


def test_an_r2_account_has_an_endpoint_of_its_own_and_is_told_by_its_beginning() -> None:
    for address in (
        parse_address(f"https://{ACCOUNT}.r2.cloudflarestorage.com/bucket"),
        parse_address("s3://bucket", {"account_id": ACCOUNT}),
    ):
        assert address.endpoint == f"https://{ACCOUNT}.r2.cloudflarestorage.com"
        assert address.options["region"] == "auto"
        assert address.told == "s3://bucket at https://0123....r2.cloudflarestorage.com"
        assert ACCOUNT not in repr(address)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("https://", "names no server"),
        ("s3://bucket/../other", "not valid"),
        ("s3://bucket//a//b", "not valid"),
        ("s3://bucket/a?x=1", "no '[?]' or '#'"),
        ("s3://key:word@bucket/a", "do not belong into a URL"),
        ("ftp://host/a", "ftp:// is not supported"),
        ("S4://bucket", "is not supported"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_storage(url)


def test_a_local_folder_has_no_options() -> None:
    with pytest.raises(ConfigError, match="has no options: got region"):
        open_storage("folder", {"region": "x"})


def test_an_address_survives_pickling() -> None:
    address = StoreAddress(scheme="s3", bucket="b", prefix="p", options={"region": "x", "skip_signature": True})
    again = pickle.loads(pickle.dumps(address))  # noqa: S301 - ours
    assert again == address
    assert dict(again.options) == {"region": "x", "skip_signature": True}
