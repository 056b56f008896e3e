"""What an answer means that is no success.

One rule for all of them: what the cluster refuses because of the *message* is the caller's error. What it
refuses because of *who asks*, and what is no answer of etcd's at all, stands in the way of a client that
enters. Later it is an outage like any other: a password is rotated and taken back, a proxy is deployed
anew.
"""

from __future__ import annotations

import re

from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered
from . import exchange as x
from .exchange import CallFailed, NotSent, Status

#: How gRPC, and etcd itself, refuse a message for its size.
_TOO_LARGE = re.compile("larger than max|request is too large")
#: How etcd refuses a token of before the last change of users and roles, and, when it asks for users again,
#: a call without a token.
_CHANGED = re.compile("revision of auth store is old|revision in header is old|user name is empty")


class LeaseNotFound(BackendError):
    """The lease that a message names has ended."""


class TokenEnded(BackendError):
    """The user's token counts no more: another one is asked for."""


class NoSpace(BackendError):
    """The database is full: the cluster takes deletions alone."""


class NoUsers(BackendError):
    """The cluster asks nobody who he is."""


class NotEtcd(BackendError):
    """What answers there is no etcd, while the client enters."""


class Denied(BackendUnavailable):
    """What was asked is refused, and was not carried out: for now, as this client was let in before.

    :ivar elsewhere: another endpoint, or another connection to this one, may answer otherwise.
    """

    def __init__(self, text: str, *, elsewhere: bool = False) -> None:
        super().__init__(text)
        self.elsewhere: bool = elsewhere


class Forbidden(Denied):
    """The user's roles do not allow what one message asks: others may be allowed."""


class NotNow(BackendUnavailable):
    """A member carries nothing out for now, as it has no leader or is too busy: another one may."""


def translate(failed: CallFailed, where: str, *, entered: bool, logs_in: bool) -> BackendError:
    """Return the error that a call failed with, in words.

    :param entered: the client was let in before.
    :param logs_in: the call was to get a token.
    """
    text = str(failed)
    if isinstance(failed, NotSent):
        return NotNow(f"{where} cannot be reached: {text}")
    if not isinstance(failed, Status):
        return Unanswered(f"{where} did not answer: {text}")
    if failed.code == x.UNIMPLEMENTED or failed.http in (401, 403, 404):
        return denied(f"{where} is not etcd, or does not pass calls on: {text}", entered=entered)
    if logs_in and failed.code in _REFUSALS:
        if "authentication is not enabled" in text:
            return NoUsers(f"{where} has refused: {text}")
        return denied(f"{where} has refused: {text}", entered=entered, elsewhere=False)
    return _of_status(failed.code, text, where, entered=entered)


def denied(text: str, *, entered: bool, elsewhere: bool = True) -> BackendError:
    """Return the error for a refusal that stands in the way of entering, and is an outage later."""
    if entered:
        return Denied(text, elsewhere=elsewhere)
    return NotEtcd(text) if elsewhere else BackendError(text)


def _of_status(code: int, text: str, where: str, *, entered: bool) -> BackendError:
    match code:
        case x.UNAVAILABLE if "no leader" in text:
            return NotNow(f"{where} cannot be reached: {text}")
        case x.DEADLINE_EXCEEDED:
            return Unanswered(f"{where} did not answer in time")
        case x.NOT_FOUND if "lease not found" in text:
            return LeaseNotFound(text)
        case x.RESOURCE_EXHAUSTED if "space exceeded" in text:
            return NoSpace(
                f"{where}: the database is full (alarm NOSPACE), so nothing can be acquired. Compact, "
                "defragment and disarm the alarm, or raise quota-backend-bytes"
            )
        case x.RESOURCE_EXHAUSTED | x.INVALID_ARGUMENT if _TOO_LARGE.search(text):
            return BackendError(
                f"{where} takes no message as large as this one: {text}. Its --max-request-bytes says "
                "how large one may be"
            )
        case x.RESOURCE_EXHAUSTED:
            return NotNow(f"{where} is too busy: {text}")
        case x.UNAUTHENTICATED:
            return TokenEnded(f"{where}: {text}")
        case x.INVALID_ARGUMENT | x.UNKNOWN if _CHANGED.search(text):
            # Somebody has changed a user or a role: no token of before counts, if it is a JWT.
            return TokenEnded(f"{where} has refused: {text}")
        case x.PERMISSION_DENIED:
            refused = f"{where} has refused: {text}"
            return Forbidden(refused) if entered else BackendError(refused)
        case x.FAILED_PRECONDITION:
            return denied(f"{where} has refused: {text}", entered=entered)
        case _ if code in _REFUSALS:
            return BackendError(f"{where} has refused: {text or code}")
    return Unanswered(f"{where}: {text} (status {code})")


_REFUSALS = frozenset(
    (
        x.PERMISSION_DENIED,
        x.INVALID_ARGUMENT,
        x.FAILED_PRECONDITION,
        x.OUT_OF_RANGE,
        x.NOT_FOUND,
        x.UNAUTHENTICATED,
    )
)
