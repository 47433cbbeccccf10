"""Buckets from the environment: where each is, and separate keys to read and to write.

For each of GRADIENTS, AGGREGATOR, DATASET and CHECKPOINTS:

    R2_<BUCKET>_ACCOUNT_ID                an R2 account, whose endpoint it is; or
    R2_<BUCKET>_ENDPOINT_URL              any S3 endpoint, which goes before (for all buckets: R2_ENDPOINT_URL, behind)
    R2_<BUCKET>_BUCKET_NAME
    R2_<BUCKET>_READ_ACCESS_KEY_ID        R2_<BUCKET>_READ_SECRET_ACCESS_KEY
    R2_<BUCKET>_WRITE_ACCESS_KEY_ID       R2_<BUCKET>_WRITE_SECRET_ACCESS_KEY

    R2_DATASET_BUCKET_LIST                a JSON array of data set buckets, read in turn; goes before R2_DATASET_...
    BUCKET_SECRETS                        all of it as one JSON object, instead of the variables above:
        {"gradients": {"account_id": ..., "name": ..., "credentials": {"read": {"access_key_id": ...,
         "secret_access_key": ...}, "write": {...}}}, "dataset": {"multiple": [{...}, {...}]}}

Nothing is read before a bucket is used. Then all that is missing or wrong is told at once, by name, and no value is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.storage.address import R2_HOST, StoreAddress
from penstock.storage.bucket_values import (
    COMMON_ENDPOINT,
    Entry,
    Purpose,
    count_at,
    is_there,
    json_problem,
    problems_of,
)
from penstock.storage.endpoints import EndpointStorage
from penstock.storage.objects import ObjectStorage
from penstock.storage.secret import Secret

BUCKETS = ("gradients", "aggregator", "dataset", "checkpoints")
PURPOSES: tuple[Purpose, ...] = ("read", "write")
_LIST = "R2_DATASET_BUCKET_LIST"
_ALL = "BUCKET_SECRETS"


def load_bucket_secrets() -> BucketSecrets:
    """The buckets of the environment, by name: ``gradients``, ``aggregator``, ``dataset``, ``checkpoints``.

    Reads nothing yet. ``load_bucket_secrets()["dataset"].storage("read")`` is ready to be read from;
    ``["dataset"]["credentials"]["read"]["access_key_id"]`` is a `Secret`; ``["dataset"]["multiple"]`` a list of buckets
    where there are several.
    """
    return BucketSecrets()


class BucketSecrets(Mapping[str, "Bucket"]):
    """All buckets. Holds no value: each is looked up in the environment where it is used."""

    def __getitem__(self, name: str) -> Bucket:
        if name not in BUCKETS:
            raise KeyError(f"there is no bucket {name!r}: expected one of {', '.join(BUCKETS)}")
        return Bucket(name)

    def __iter__(self) -> Iterator[str]:
        return iter(BUCKETS)

    def __len__(self) -> int:
        return len(BUCKETS)

    def __repr__(self) -> str:
        return f"BucketSecrets({', '.join(BUCKETS)})"

    def check(self, wanted: Mapping[str, tuple[Purpose, ...]] | None = None) -> None:
        """Refuse to begin with what is missing or wrong, all of it at once; `wanted` says which buckets are needed for
        what, else it is all of them for everything."""
        names = wanted if wanted is not None else dict.fromkeys(BUCKETS, PURPOSES)
        problems = [
            problem
            for name, purposes in names.items()
            for purpose in purposes
            for problem in self[name].problems(purpose)
        ]
        _refuse(", ".join(f"{name} ({', '.join(purposes)})" for name, purposes in names.items()), problems)


class Bucket(Mapping[str, Any]):
    """One bucket, or several with the same data. As a mapping: account_id, endpoint_url, name (also bucket_name) and
    credentials, or `multiple`. A field is checked with all that it takes to use the bucket as it is asked for."""

    def __init__(self, name: str, entry: Entry | None = None) -> None:
        self._name = name
        self._entry = entry

    def storage(
        self, purpose: Purpose = "read", prefix: str = "", *, r2_region: str | None = None, **more: Any
    ) -> ObjectStorage | EndpointStorage:
        """The bucket's objects below a prefix, with the keys to read or to write. Several buckets are read in turn;
        they are written one by one. `r2_region` is what requests to R2 are signed for, ``auto`` where not given; other
        endpoints have regions of their own. `more` goes to the storage, such as its `budgets`."""
        if purpose not in PURPOSES:
            raise ConfigError(f"the {self._name} bucket is for {' or '.join(PURPOSES)}: got {purpose!r}")
        _refuse(f"{self._name} ({purpose})", self.problems(purpose))
        if not self._is_many():
            return ObjectStorage(self._address(purpose, prefix, r2_region), **more)
        if purpose == "write":
            raise ConfigError(
                f"there are several {self._name} buckets: write to each of them, "
                f'load_bucket_secrets()["{self._name}"]["multiple"][0].storage("write")'
            )
        stores = [ObjectStorage(each._address(purpose, prefix, r2_region)) for each in self._each()]
        return EndpointStorage(stores, **more)

    def problems(self, purpose: Purpose | None = None) -> list[str]:
        """What is missing or wrong, by name."""
        wrong = [] if self._entry is not None else self._problems_of_all()
        return wrong or [problem for each in self._each() for problem in problems_of(each._found(), purpose)]

    def __getitem__(self, field: str) -> Any:
        if field not in self:
            raise KeyError(f"the {self._name} bucket has no {field!r}: expected one of {', '.join(self)}")
        if field == "multiple":
            _refuse(self._name, self._problems_of_all())
            return self._each()
        if field == "credentials":
            return {purpose: _Credentials(self, purpose) for purpose in PURPOSES}
        _refuse(self._name, self.problems())
        entry = self._found()
        found = entry.secret("name" if field == "bucket_name" else field)
        if found is None and field == "endpoint_url":
            return self._endpoint()
        return found.reveal() if found is not None else None

    def __iter__(self) -> Iterator[str]:
        if self._is_many():
            return iter(("multiple",))
        return iter(("account_id", "bucket_name", "credentials", "endpoint_url", "name"))

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def __contains__(self, field: object) -> bool:
        return field in tuple(iter(self))

    def __repr__(self) -> str:
        return f"Bucket({self._name!r}, from {self._found().label('name') if not self._is_many() else 'several'})"

    def _found(self) -> Entry:
        if self._entry is not None:
            return self._entry
        if is_there(_ALL, (self._name,)):
            return Entry(_ALL, (self._name,))
        return Entry(f"R2_{self._name.upper()}", is_json=False)

    def _lists(self) -> tuple[str, tuple[str | int, ...]] | None:
        """Where the array of several buckets stands, where there is one."""
        if self._entry is not None:
            return None
        if self._name == "dataset" and os.environ.get(_LIST):
            return _LIST, ()
        inside = (self._name, "multiple")
        return (_ALL, inside) if is_there(_ALL, inside) else None

    def _is_many(self) -> bool:
        return self._lists() is not None

    def _each(self) -> list[Bucket]:
        place = self._lists()
        if place is None:
            return [self]
        variable, path = place
        return [Bucket(self._name, Entry(variable, (*path, number))) for number in range(count_at(variable, path) or 0)]

    def _problems_of_all(self) -> list[str]:
        """What is wrong with where the bucket is described, before any field of it."""
        problems = [json_problem(_ALL, dict)]
        if self._name == "dataset":
            problems.append(json_problem(_LIST, list))
        begins = f"R2_{self._name.upper()}_"
        own = sorted(name for name in os.environ if name.startswith(begins) and os.environ[name])
        if own and is_there(_ALL, (self._name,)):
            problems.append(f"{_ALL}.{self._name} and {', '.join(own)} are both set: keep one of them")
        place = self._lists()
        if place is not None and not any(problems) and not count_at(*place):
            problems.append(
                f"{place[0]}{''.join(f'.{part}' for part in place[1])} is not a JSON array with something in it"
            )
        return [problem for problem in problems if problem]

    def _endpoint(self) -> str | None:
        entry = self._found()
        given = entry.secret("endpoint_url")
        if given is not None:
            return given.reveal()
        if entry.secret("account_id") is not None:
            return None
        return os.environ.get(COMMON_ENDPOINT)

    def _address(self, purpose: Purpose, prefix: str, r2_region: str | None = None) -> StoreAddress:
        entry = self._found()
        name, account, endpoint = entry.secret("name"), entry.secret("account_id"), self._endpoint()
        options: dict[str, str | bool | Secret] = {}
        if endpoint is not None:
            options["endpoint"] = endpoint
        elif account is not None:
            options["account_id"] = account
        if r2_region is not None and (endpoint is None or R2_HOST in endpoint):
            options["region"] = r2_region
        for part in ("access_key_id", "secret_access_key"):
            key = entry.secret(f"{purpose}.{part}")
            assert key is not None, "checked before"
            options[part] = key
        assert name is not None, "checked before"
        return StoreAddress(scheme="s3", bucket=name.reveal(), prefix=prefix.strip("/"), options=options)


class _Credentials(Mapping[str, Secret]):
    """The keys to read or to write a bucket, checked when asked for."""

    def __init__(self, bucket: Bucket, purpose: Purpose) -> None:
        self._bucket = bucket
        self._purpose: Purpose = purpose

    def __getitem__(self, part: str) -> Secret:
        if part not in tuple(self):
            raise KeyError(f"credentials have no {part!r}: expected access_key_id or secret_access_key")
        _refuse(f"{self._bucket._name} ({self._purpose})", self._bucket.problems(self._purpose))
        found = self._bucket._found().secret(f"{self._purpose}.{part}")
        assert found is not None, "checked before"
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(("access_key_id", "secret_access_key"))

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"<credentials to {self._purpose}>"


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        told = "".join(f"\n  {problem}" for problem in dict.fromkeys(problems))
        raise ConfigError(f"the environment does not say all about the bucket {what}; set or mend:{told}")
