"""SASL with the mechanism DIGEST-MD5, as ZooKeeper's servers ask for it (RFC 2831, ``auth`` only)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

#: Names of the service and its realm in ZooKeeper's servers.
_SERVICE = "zookeeper"
_REALM = "zk-sasl-md5"
_FIELD = re.compile(r'([\w-]+)=(?:"((?:[^"\\]|\\.)*)"|([^,]*))')


class SaslError(Exception):
    """The server's part of the exchange is wrong."""


class DigestMd5:
    """One exchange: ``respond`` to the server's challenge, then ``check`` its proof."""

    def __init__(self, user: str, password: str) -> None:
        self._user = user
        self._password = password
        self._expected = ""

    def respond(self, challenge: bytes, nonce: str | None = None) -> bytes:
        """Return the answer to the challenge. ``nonce`` is the client's, random unless given."""
        asked = _fields(challenge)
        if "nonce" not in asked:
            raise SaslError("the server's SASL challenge is not one of DIGEST-MD5")
        realm = asked.get("realm", _REALM)
        uri = f"{_SERVICE}/{realm}"
        said = {
            "username": _quoted(self._user),
            "realm": _quoted(realm),
            "nonce": _quoted(asked["nonce"]),
            "cnonce": _quoted(nonce or secrets.token_hex(16)),
            "nc": "00000001",
            "qop": "auth",
            "digest-uri": _quoted(uri),
        }
        client_nonce = said["cnonce"].strip('"')
        secret = _md5(_hashed(f"{self._user}:{realm}:") + _hashed(self._password))
        first = _hex(secret + f":{asked['nonce']}:{client_nonce}".encode())
        middle = f"{asked['nonce']}:00000001:{client_nonce}:auth"

        def proof(method: str) -> str:
            return _hex(f"{first}:{middle}:{_hex(f'{method}:{uri}'.encode())}".encode())

        self._expected = proof("")
        said |= {"response": proof("AUTHENTICATE"), "charset": "utf-8"}
        return ",".join(f"{name}={value}" for name, value in said.items()).encode()

    def check(self, answer: bytes) -> None:
        """Raise unless the server has proved that it knows the password, too."""
        if not hmac.compare_digest(_fields(answer).get("rspauth", ""), self._expected):
            raise SaslError("the server did not prove that it knows the password")


def _fields(text: bytes) -> dict[str, str]:
    found = _FIELD.findall(text.decode("utf-8", "replace"))
    return {name: re.sub(r"\\(.)", r"\1", quoted) or plain for name, quoted, plain in found}


def _hashed(text: str) -> bytes:
    """Return a text as it is hashed: in ISO 8859-1 if that has its letters, though it is sent in UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _hex(data: bytes) -> str:
    return _md5(data).hex()
