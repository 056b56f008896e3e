"""What a server refuses, and what follows from it: try again later, ask another node, or give up."""

from __future__ import annotations

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from ..._errors import BackendError, BackendUnavailable

#: Codes of refusals that will pass. Nothing was carried out.
_PASSING = frozenset(
    (
        "LOADING",
        "BUSY",
        "READONLY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "MISCONF",
        "NOREPLICAS",
    )
)
#: How nodes end a script whose slot is on its way, when it touches a key that it has deleted itself.
_ENDED = "non local key in a cluster node"
#: How servers refuse the database of a URL.
_NO_SUCH_DATABASE = (
    "DB index is out of range",
    "invalid DB index",
    "SELECT is not allowed in cluster mode",
)


def will_pass(refusal: Exception) -> bool:
    """Tell whether the same command may be accepted later, from the first word of an error reply."""
    return code_of(refusal) in _PASSING


def code_of(refusal: Exception) -> str:
    """Return the code of an error reply, its first word."""
    text = str(refusal)
    if text.startswith("ERR Error running script"):
        # Redis before 7 wraps the refusal of a command in a script.
        text = text.rpartition(": -")[2]
    return text.partition(" ")[0]


class ReplyError(ResponseError):
    """An error reply of the server; the first word is its code."""

    def __repr__(self) -> str:  # redis-py's leaves the text out
        return f"ReplyError({str(self)!r})"

    @property
    def code(self) -> str:
        return code_of(self)

    @property
    def may_be_done(self) -> bool:
        """Whether a script was ended in the middle: a part of it is carried out."""
        return _ENDED in str(self)


class Unusable(RedisError):
    """What the source says cannot be used, whatever the server would say: a file of TLS, say."""


class Redirected(BackendError):
    """A node of a cluster says that another node owns the name."""

    def __init__(self, described: str, reply: str) -> None:
        super().__init__(
            f"{described} is one node of a cluster: use redis+cluster:// to reach all ({reply})"
        )
        word, _, address = reply.split(" ")[:3]
        host, _, port = address.rpartition(":")
        self.asking: bool = word == "ASK"
        self.address: tuple[str, int] = (host, int(port))


def is_refusal(reason: Exception | None) -> bool:
    """Tell whether the server rejects this user, or cannot be asked: a retry alone will not help."""
    if isinstance(reason, ResponseError) and str(reason).startswith(_NO_SUCH_DATABASE):
        return True
    kinds = AuthenticationError | NoPermissionError | BackendError | Unusable
    return isinstance(reason, kinds) and not isinstance(reason, BackendUnavailable)


def refusal_in(failed: BackendError | ExceptionGroup[Exception]) -> BackendError | None:
    """Return why a server rejects this client, None if it is only unreachable; raise any other error."""
    errors: list[Exception] = [failed]
    for error in errors:
        if isinstance(error, ExceptionGroup):
            errors.extend(error.exceptions)
        elif not isinstance(error, BackendError):
            raise failed
    refusals = [error for error in errors if isinstance(error, BackendError)]
    return next((one for one in refusals if not isinstance(one, BackendUnavailable)), None)
