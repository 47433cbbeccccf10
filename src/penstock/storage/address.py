"""Where an object store is and what it takes to get in: told without secrets, resolved only when connecting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError
from penstock.storage.keys import check_key
from penstock.storage.secret import Secret
from penstock.storage.web import redacted

R2_HOST = ".r2.cloudflarestorage.com"
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "http": "http", "https": "http"}
_PLAIN = {
    "account_name",
    "aws_endpoint_url_s3",
    "checksum_algorithm",
    "default_region",
    "endpoint",
    "region",
    "request_payer",
    "skip_signature",
    "unsigned_payload",
    "virtual_hosted_style_request",
}
"""Options that may be seen; every other one may hold a credential."""
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

Options = Mapping[str, "str | bool | Secret"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """One bucket (container, web folder) and a prefix in it."""

    scheme: str
    """s3, gs, az or http."""
    bucket: str
    """The bucket's name; for http the URL that keys are below."""
    prefix: str = ""
    options: Options = field(default_factory=dict, repr=False)
    """Options of the store by obstore's names (``endpoint``, ``region``, ``access_key_id``, ``secret_access_key``,
    ``skip_signature``, ...), and ``account_id`` for an R2 account's own endpoint. What is not given comes from the
    environment by the usual names (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_...``, ``AZURE_...``)."""

    def __post_init__(self) -> None:
        if not self.bucket:
            raise ConfigError(f"{self.scheme}:// names no bucket: expected {self.scheme}://bucket/prefix")
        if self.prefix:
            check_key(self.prefix)
        options = dict(self.options)
        account = options.pop("account_id", None)
        if account is not None and "endpoint" not in options:
            revealed = account.reveal() if isinstance(account, Secret) else str(account)
            options["endpoint"] = f"https://{revealed}{R2_HOST}"
        wrapped = {
            name: value if name in _PLAIN or not isinstance(value, str) else Secret(value)
            for name, value in options.items()
        }
        endpoint = wrapped.get("endpoint")
        if isinstance(endpoint, str):
            _check_endpoint(endpoint)
            if R2_HOST in endpoint:
                wrapped.setdefault("region", "auto")
        object.__setattr__(self, "options", MappingProxyType(wrapped))

    @property
    def url(self) -> str:
        """As a user would write it."""
        base = redacted(self.bucket).rstrip("/") if self.scheme == "http" else f"{self.scheme}://{self.bucket}"
        return f"{base}/{self.prefix}" if self.prefix else base

    @property
    def told(self) -> str:
        """The URL and, where it is not the provider's own, the endpoint."""
        endpoint = self.endpoint
        return f"{self.url} at {_without_account(redacted(endpoint))}" if endpoint else self.url

    @property
    def endpoint(self) -> str | None:
        """The endpoint that was asked for, by option or environment; None for the provider's own."""
        names = ("aws_endpoint_url_s3", "endpoint")
        given = next((self.options[name] for name in names if name in self.options), None)
        if given is None and self.scheme == "s3":
            given = next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), None)
        return given.reveal() if isinstance(given, Secret) else str(given) if given is not None else None

    def check(self) -> None:
        """Refuse what cannot work, the environment's part in it included."""
        if (endpoint := self.endpoint) is not None:
            _check_endpoint(endpoint)
        if self.scheme == "s3" and ("access_key_id" in self.options) != ("secret_access_key" in self.options):
            raise ConfigError(f"{self.url}: access_key_id and secret_access_key go together: got one of them")

    def path(self, key: str) -> str:
        """A key's place in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def __getstate__(self) -> dict[str, object]:
        return {"scheme": self.scheme, "bucket": self.bucket, "prefix": self.prefix, "options": dict(self.options)}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, MappingProxyType(value) if isinstance(value, dict) else value)


def parse_address(url: str, options: Options | None = None) -> StoreAddress:
    """The address behind ``s3://bucket/prefix``, ``gs://``, ``az://container/prefix``, ``http(s)://``, or R2's own
    ``https://<account>.r2.cloudflarestorage.com/bucket/prefix``."""
    parts = urlsplit(url)
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None:
        raise ConfigError(
            f"storage scheme {parts.scheme}:// is not supported: expected a local path, file://, s3://, gs://, az:// "
            "or https://"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"{redacted(url) if scheme == 'http' else parts.scheme + '://...'}: credentials do not belong into a URL: "
            "give them as options or by environment variables"
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"{parts.scheme}://{parts.netloc}{parts.path}: expected no '?' or '#' behind it")
    given = dict(options or {})
    below = unquote(parts.path).strip("/")
    if scheme == "http" and parts.netloc.endswith(R2_HOST):
        bucket, _, prefix = below.partition("/")
        return StoreAddress(
            scheme="s3",
            bucket=bucket,
            prefix=prefix,
            options={"endpoint": f"{parts.scheme}://{parts.netloc}", "region": "auto", **given},
        )
    if scheme == "http":
        if not parts.netloc:
            raise ConfigError(f"{parts.scheme}:// names no server: expected {parts.scheme}://server/folder")
        return StoreAddress(
            scheme="http", bucket=f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"), options=given
        )
    return StoreAddress(scheme=scheme, bucket=parts.netloc, prefix=below, options=given)


def _without_account(endpoint: str) -> str:
    """An R2 endpoint with as much of its account as tells it from others."""
    head, host, tail = endpoint.partition(R2_HOST)
    scheme, slashes, account = head.partition("://")
    return f"{scheme}{slashes}{account[:4]}...{host}{tail}" if host else endpoint


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(
            f"the endpoint {parts.scheme}://{host} is not valid: expected a URL such as https://s3.example.com, "
            "without '?' or '#'"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"the endpoint {parts.scheme}://{host} holds a password: give it as an option, not in the URL"
        )
