"""``aiodlock doctor`` where several servers stand behind one URL: a Sentinel service, a cluster.

It says which of them is wrong: a sentinel that does not answer, a primary that is dead, one whose memory is
full. Then it examines each primary as it does a single server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from ._doctor_redis import examine_server
from ._finding import Finding

#: A server that does not answer within so many seconds counts as silent.
_WITHIN = 3.0
_SLOTS = 16_384
#: These differ for each server, or were tried through the whole service.
_LEFT_OUT = frozenset(("lock", "replicas", "acl"))


@dataclass(frozen=True, slots=True)
class _Url:
    """A URL with several hosts."""

    scheme: str
    login: str
    hosts: tuple[str, ...]
    path: str
    query: str

    @classmethod
    def read(cls, url: str) -> _Url:
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        netloc, _, path = place.partition("/")
        login, at, hosts = netloc.rpartition("@")
        plain = scheme.lower().partition("+")[0]
        return cls(plain, login + at, tuple(h.strip() for h in hosts.split(",")), path, query)

    def of_server(self, host: str) -> str:
        """Return the URL of one server, with the login of the servers."""
        options = "&".join(o for o in self.query.split("&") if not o.startswith("sentinel_"))
        return f"{self.scheme}://{self.login}{host}/?{options}"

    def of_sentinel(self, host: str) -> str:
        """Return the URL of one sentinel, with the login of the sentinels."""
        options = (option for option in self.query.split("&") if option)
        own = [o.removeprefix("sentinel_") for o in options if o.startswith(("sentinel_", "ssl_"))]
        port = "" if ":" in host.rpartition("]")[2] else ":26379"
        return f"{self.scheme}://{host}{port}/?{'&'.join(own)}"


async def _asked(url: str, ask: Callable[[Redis], Awaitable[Any]]) -> Any:
    """Return what a server answers, or the error."""
    try:
        async with asyncio.timeout(_WITHIN), Redis.from_url(url, decode_responses=True) as server:
            return await ask(server)
    except (RedisError, OSError) as failed:
        return failed


def _command(*words: str) -> Callable[[Redis], Awaitable[Any]]:
    return lambda server: server.execute_command(*words)  # type: ignore[no-untyped-call]


def _why(failed: Exception) -> str:
    """Say that it does not answer, or what its answer was."""
    if isinstance(failed, TimeoutError):
        return f"does not answer: no answer within {_WITHIN:g} s"
    refuses = isinstance(failed, ResponseError | AuthenticationError)
    return f"{'refuses' if refuses else 'does not answer'}: {str(failed) or type(failed).__name__}"


async def _examined(url: str, which: str, prefix: str, fix: bool) -> list[Finding]:
    """Return the findings about one primary."""
    try:
        async with asyncio.timeout(3 * _WITHIN):
            found = await examine_server(url, prefix, fix=fix)
    except (RedisError, OSError) as failed:
        return [_silent_primary(which, _why(failed))]
    return [
        replace(one, subject=f"{which}: {one.subject}")
        for one in found
        if one.subject not in _LEFT_OUT
    ]


def _silent_primary(which: str, why: str) -> Finding:
    return Finding(
        which,
        "error",
        why,
        "The names that it keeps can be neither locked nor released until it, or a replica in its place, "
        "answers.",
        "Look at this server and its log. If it does not come back, promote a replica.",
    )


# -- a Sentinel service ----------------------------------------------------------------------------


async def examine_sentinels(url: str, prefix: str, *, fix: bool) -> list[Finding]:
    """Examine each sentinel, and the primary and the replicas that they name."""
    named = _Url.read(url)
    service = named.path.partition("/")[0]
    answers = await asyncio.gather(
        *(
            _asked(named.of_sentinel(h), _command("SENTINEL", "MASTER", service))
            for h in named.hosts
        )
    )
    told = list(zip(named.hosts, answers, strict=True))
    answered = [(host, answer) for host, answer in told if not isinstance(answer, Exception)]
    masters = [_facts(answer) for _, answer in answered]
    findings = [_about_sentinel(host, answer, service) for host, answer in told]
    if not masters:
        return [*findings, _no_sentinel()]
    findings.append(_about_sentinels(masters))
    primaries = sorted({f"{one['ip']}:{one['port']}" for one in masters})
    if len(primaries) > 1:
        findings.append(_two_primaries(primaries))
    for primary in primaries:
        which = f"primary {primary}"
        findings += await _examined(named.of_server(primary), which, prefix, fix)
    replicas = await asyncio.gather(
        *(
            _asked(named.of_sentinel(host), _command("SENTINEL", "REPLICAS", service))
            for host, _ in answered
        )
    )
    known = next((r for r in replicas if not isinstance(r, Exception)), None)
    if known is None:
        return [*findings, _unknown_replicas(replicas)]
    return [*findings, _about_replicas([_facts(one) for one in known])]


def _facts(answer: Any) -> dict[str, str]:
    if isinstance(answer, Mapping):
        return {str(key): str(value) for key, value in answer.items()}
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _about_sentinel(host: str, answer: Any, service: str) -> Finding:
    if not isinstance(answer, Exception):
        facts = _facts(answer)
        text = f"names {facts['ip']}:{facts['port']} as the primary of {service!r}"
        if "down" in facts.get("flags", ""):
            return Finding(
                f"sentinel {host}",
                "error",
                f"{text}, and takes it for dead ({facts['flags']})",
                "Until a replica is promoted, no lock can be acquired or released.",
                "If that lasts, see whether enough sentinels reach each other to vote.",
            )
        return Finding(f"sentinel {host}", "ok", text)
    if "No such master" in str(answer):
        return Finding(
            f"sentinel {host}",
            "error",
            f"knows no service {service!r}",
            "This sentinel leads no client to a server.",
            "Correct the service in the URL, or this sentinel's configuration.",
        )
    return Finding(
        f"sentinel {host}",
        "warning",
        _why(answer),
        "Clients ask the other sentinels. Without a majority of them there is no failover.",
        "Bring this sentinel back, or leave it out of the URL.",
    )


def _no_sentinel() -> Finding:
    return Finding(
        "sentinels",
        "error",
        "none of them leads to the service",
        "A client that starts now cannot find the primary. Connected clients go on, without failover.",
        "Bring a majority of the sentinels back.",
    )


def _about_sentinels(masters: Sequence[Mapping[str, str]]) -> Finding:
    """Compare how many answer with how many there are, as they say themselves."""
    there = max(int(one.get("num-other-sentinels", 0)) + 1 for one in masters)
    quorum = max(int(one.get("quorum", 1)) for one in masters)
    needed = max(quorum, there // 2 + 1)
    found = f"{len(masters)} of {there} answer here; a failover takes {needed}"
    if len(masters) >= needed:
        return Finding("sentinels", "ok", found)
    return Finding(
        "sentinels",
        "warning",
        found,
        "If the sentinels do not reach each other either, a dead primary is not replaced.",
        "Bring the sentinels back that do not answer, and name all of them in the URL.",
    )


def _two_primaries(primaries: Sequence[str]) -> Finding:
    return Finding(
        "primaries",
        "error",
        f"the sentinels name several: {', '.join(primaries)}",
        "During a failover that is normal for seconds. If it lasts, two clients can hold one lock.",
        "See which sentinel is wrong, and reset it (SENTINEL RESET). No sentinel of another service "
        "must be in the URL.",
    )


def _unknown_replicas(answers: Sequence[Exception]) -> Finding:
    if all(isinstance(answer, NoPermissionError) for answer in answers):
        return Finding(
            "replicas",
            "note",
            "unknown: the user of the sentinels may not run SENTINEL REPLICAS",
            "If no replica is there, nothing can take the place of a primary that dies.",
            "Give that user the right +sentinel|replicas, on each sentinel.",
        )
    why = "; ".join(dict.fromkeys(map(_why, answers)))
    return Finding("replicas", "warning", f"unknown: every sentinel {why}")


def _about_replicas(replicas: Sequence[Mapping[str, str]]) -> Finding:
    away = [
        f"{one['ip']}:{one['port']}"
        for one in replicas
        if one.get("master-link-status") != "ok" or "down" in one.get("flags", "")
    ]
    if not replicas or len(away) == len(replicas):
        return Finding(
            "replicas",
            "warning",
            "none is there" if not replicas else f"none follows the primary: {', '.join(away)}",
            "If the primary dies, nothing can take its place.",
            "Add a replica, or bring one back.",
        )
    if away:
        return Finding(
            "replicas", "warning", f"not in step: {', '.join(away)}", "", "Look at its log."
        )
    return Finding(
        "replicas",
        "note",
        f"{len(replicas)}",
        "Replication is asynchronous: a failover may lose the last grants. Then two clients hold one lock.",
        "Use fencing tokens, or Client(min_replicas=1).",
    )


# -- a cluster -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Node:
    """A line of CLUSTER NODES."""

    host: str
    flags: frozenset[str]
    slots: int
    connected: bool

    @classmethod
    def read(cls, line: str, asked: str) -> _Node:
        _, address, flags, _, _, _, _, link, *slots = line.split(" ")
        host, _, port = address.partition("@")[0].rpartition(":")
        host = host or asked.rpartition(":")[0]
        count = sum(_size(part) for part in slots if not part.startswith("["))
        return cls(f"{host}:{port}", frozenset(flags.split(",")), count, link == "connected")


def _size(slots: str) -> int:
    first, _, last = slots.partition("-")
    return int(last or first) - int(first) + 1


async def examine_cluster(url: str, prefix: str, *, fix: bool) -> list[Finding]:
    """Examine what the cluster says of itself, and each primary that has slots."""
    named = _Url.read(url)
    answers = await asyncio.gather(
        *(_asked(named.of_server(host), _text_of_nodes) for host in named.hosts)
    )
    findings, views = [], []
    for host, answer in zip(named.hosts, answers, strict=True):
        if not isinstance(answer, Exception):
            views.append((host, answer))
            continue
        meaning = "Clients enter by the other nodes in the URL."
        advice = "Bring this node back, or name another one."
        findings.append(Finding(f"seed {host}", "warning", _why(answer), meaning, advice))
    if not views:
        return [*findings, _no_seed(answers)]
    host, text = views[0]
    nodes = [_Node.read(line, host) for line in text.splitlines() if line.strip()]
    primaries = [node for node in nodes if "master" in node.flags and node.slots]
    findings.append(_about_slots(primaries))
    for node in primaries:
        which = f"primary {node.host}"
        if marks := sorted(node.flags & {"fail", "fail?"}):
            findings.append(_silent_primary(which, f"the cluster marks it {' and '.join(marks)}"))
        else:
            findings += await _examined(named.of_server(node.host), which, prefix, fix)
    return findings


def _no_seed(answers: Sequence[Exception]) -> Finding:
    if all(isinstance(answer, NoPermissionError) for answer in answers):
        return Finding(
            "cluster",
            "note",
            "unknown: the user may not run CLUSTER NODES",
            "Its primaries were not examined.",
            "Give the user the right +cluster|nodes, on each node.",
        )
    return Finding("cluster", "error", "no node in the URL answers", "No lock can be acquired.")


async def _text_of_nodes(server: Redis) -> str:
    # As it is sent: redis-py makes a mapping of it.
    connection = await server.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    await connection.send_command("CLUSTER", "NODES")
    answer = await connection.read_response()
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _about_slots(primaries: Sequence[_Node]) -> Finding:
    count = sum(node.slots for node in primaries)
    dead = sum(node.slots for node in primaries if node.flags & {"fail", "fail?"})
    found = f"{len(primaries)} primaries have {count} of {_SLOTS} slots"
    if dead or count < _SLOTS:
        return Finding(
            "cluster",
            "error",
            f"{found}; {_SLOTS - count + dead} slots have no primary that works",
            "Names in these slots cannot be locked. With cluster-require-full-coverage yes, no name can.",
            "Bring the primary back, promote a replica (CLUSTER FAILOVER), or assign the slots.",
        )
    return Finding("cluster", "ok", found)
