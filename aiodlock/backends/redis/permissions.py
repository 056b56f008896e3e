"""May this user run every command of the scripts? Checked while a client is entered.

Some servers do not say which command of a script they refused. A script that is refused half-way leaves
what it has written. So each command is sent once by itself, where it has no effect: on a key of another
type.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..._errors import BackendError
from .refusals import ReplyError, will_pass
from .wire import Wire

#: The commands of the scripts and of the client, with arguments after the key. SUBSCRIBE was used before
#: this check. Only ``Client.locks`` needs SCAN.
CHECKED: dict[str, tuple[str, ...]] = {
    "HGETALL": (),
    "HGET": ("f",),
    "HSET": ("f", "v"),
    "HDEL": ("f",),
    "HEXISTS": ("f",),
    "EXISTS": (),
    "GET": (),
    "MGET": (),
    "PTTL": (),
    "PEXPIRE": ("1000",),
    "XADD": ("*", "f", "v"),
    "XRANGE": ("-", "+"),
    "XDEL": ("0-1",),
    "DEL": (),
}
#: What the nodes of a quorum need besides.
CHECKED_VOTING: dict[str, tuple[str, ...]] = {
    "ZADD": ("1", "f"),
    "ZRANGE": ("0", "0"),
    "ZREM": ("f",),
    "HLEN": (),
}
#: How servers answer to a command that their configuration has taken away.
_NO_SUCH_COMMAND = "err unknown command"


async def check_permissions(
    wire: Wire,
    *,
    key: str,
    channel: str,
    prefix: str,
    publish: str = "PUBLISH",
    checked: Mapping[str, tuple[str, ...]] = CHECKED,
) -> None:
    """Raise BackendError that names every command, key or channel the user may not use, or every command
    that the server does not have.

    :param publish: the command that the scripts publish with; SPUBLISH on a cluster's node.
    :param checked: the commands, with arguments after the key.
    :raises ReplyError: when the server refuses to write, for now (READONLY, LOADING).
    """
    calls: list[tuple[str, ...]] = [("SET", key, "1", "PX", "1000")]
    calls += [(command, key, *rest) for command, rest in checked.items()]
    calls += [("TIME",), ("PING",), ("EVAL", "return 1", "0"), ("EVALSHA", "0" * 40, "0")]
    calls += [("PUBLISH", channel, ""), ("UNSUBSCRIBE", channel)]
    if publish == "SPUBLISH":
        calls += [("SPUBLISH", channel, ""), ("SUNSUBSCRIBE", channel)]
    missing: dict[str, None] = {}  # in order, each once
    absent: list[str] = []
    for call, reply in [(call, wire.send(*call)) for call in calls]:
        try:
            await reply
        except ReplyError as refused:
            if refused.code == "NOPERM":
                missing[_what(call[0], str(refused), prefix)] = None
            elif str(refused).lower().startswith(_NO_SUCH_COMMAND):
                absent.append(call[0])
            elif call[0] == "SET" and will_pass(refused):
                raise
    if absent:
        raise BackendError(
            f"the server does not have these commands, which aiodlock needs: {', '.join(absent)} "
            "(is there a rename-command in its configuration?)"
        )
    if missing:
        raise BackendError(
            f"the server's ACL does not allow this user what aiodlock needs: {', '.join(missing)}"
        )


def _what(command: str, refusal: str, prefix: str) -> str:
    if "command" in refusal:
        return f"the command {command}"
    return f"the {'channels' if 'channel' in refusal else 'keys'} {prefix}:*"
