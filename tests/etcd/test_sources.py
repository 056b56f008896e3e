"""URLs of etcd's, and which versions are warned of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiodlock import Client, Unsupported
from aiodlock.backends.etcd.sources import read_url
from aiodlock.backends.etcd.versions import too_old


def test_url_names_members_user_and_files() -> None:
    access, described = read_url("etcds://ann:p%40ss@one,two:2000?ca=/ca.pem&cert=/c&key=/k")
    assert access.endpoints == ("one:2379", "two:2000")
    assert (access.user, access.password) == ("ann", "p@ss")
    assert (access.tls, access.ca, access.cert, access.key) == (True, "/ca.pem", "/c", "/k")
    assert described == "etcds://one,two:2000"
    assert read_url("etcd://[::1]:2379")[0].endpoints == ("[::1]:2379",)


@pytest.mark.parametrize("missing", ["hpack", "hyperframe.frame"])
def test_client_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import aiodlock; aiodlock.Client('etcd://one')"
    # In another process: modules that are imported anew here would be others than the package knows.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'aiodlock[etcd]'" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "etcd:one",
        "etcd://",
        "etcd://one,,two",
        "etcd://one:0",
        "etcd://one:port",
        "etcd://one,a..b",
        "etcd://one/path",
        "etcd://one?ca=/x",
        "etcds://one?cert=/x",
        "etcds://one?colour=red",
    ],
)
def test_url_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="source"):
        Client(url)


def test_password_is_in_no_message() -> None:
    client = Client("etcd://ann:secret@one:2379")
    assert "secret" not in repr(client)
    with pytest.raises(ValueError) as refused:
        Client("etcd://ann:secret@one/path")
    assert "secret" not in str(refused.value)


def test_options_of_other_stores_are_refused() -> None:
    with pytest.raises(Unsupported, match="majority"):
        Client("etcd://one", min_replicas=1)
    for options in ({"restart_delay": 1.0}, {"configure_notifications": True}, {"create": True}):
        with pytest.raises(ValueError):
            Client("etcd://one", **options)


@pytest.mark.parametrize(
    ("version", "honest"),
    [
        ("3.4.23", "3.4.38"),
        ("3.4.38", None),
        ("3.5.1", "3.5.23"),
        ("3.5.23", None),
        ("3.6.4", "3.6.5"),
        ("3.6.5", None),
        ("3.7.0", None),
        ("3.3.27", "3.4.38"),
        ("3.7.0-alpha.0", None),
        ("what", None),
    ],
)
def test_version_before_leases_could_be_relied_on_is_told(version: str, honest: str | None) -> None:
    assert too_old(version) == honest
