"""The tree of errors: bases, names, pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

import aiodlock
from aiodlock import (
    AcquireTimeout,
    BackendError,
    BackendUnavailable,
    ClientClosed,
    DeadlockError,
    LockError,
    LockLost,
    NotHeld,
    Unsupported,
    WouldBlock,
)
from aiodlock.backends.kept_place import KeptPlace

TREE: dict[type[LockError], tuple[type[Exception], ...]] = {
    AcquireTimeout: (LockError, TimeoutError),
    WouldBlock: (LockError,),
    LockLost: (LockError,),
    NotHeld: (LockError, RuntimeError),
    DeadlockError: (LockError, RuntimeError),
    ClientClosed: (LockError, RuntimeError),
    Unsupported: (LockError, ValueError),
    BackendError: (LockError,),
    BackendUnavailable: (BackendError, ConnectionError),
}


@pytest.mark.parametrize(("error", "bases"), TREE.items())
def test_error_has_the_bases_of_the_contract(
    error: type[LockError], bases: tuple[type[Exception], ...]
) -> None:
    assert error.__bases__ == bases


def test_lock_error_is_an_exception_and_nothing_else_public_is_an_error() -> None:
    assert LockError.__bases__ == (Exception,)
    public = {v for v in vars(aiodlock).values() if isinstance(v, type)}
    assert {v for v in public if issubclass(v, BaseException)} == {LockError, *TREE}


def _make(error: type[LockError]) -> LockError:
    if error is LockLost:
        return LockLost("lease on 'a b' expired", name="a b", reason="expired")
    return error("about 'a b'", name="a b")


@pytest.mark.parametrize("error", [LockError, *TREE])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling(error: type[LockError], protocol: int) -> None:
    original = _make(error)
    original.add_note("seen before")
    back = pickle.loads(pickle.dumps(original, protocol))
    assert type(back) is error
    assert str(back) == str(original)
    assert back.name == "a b"
    assert back.__notes__ == ["seen before"]
    assert getattr(back, "reason", None) == getattr(original, "reason", None)


@pytest.mark.parametrize("error", [LockError, *TREE])
def test_error_can_be_copied(error: type[LockError]) -> None:
    original = _make(error)
    assert str(copy.copy(original)) == str(original)
    assert copy.deepcopy(original).name == "a b"


@pytest.mark.parametrize("error", [LockError, *TREE])
def test_error_can_be_made_again_of_its_arguments(error: type[LockError]) -> None:
    """Celery's results in JSON have the class, its module and the arguments, and nothing else."""
    original = _make(error)
    back = error(*original.args)
    assert (type(back), str(back)) == (error, str(original))


def test_error_without_a_lock_has_no_name() -> None:
    assert BackendError("something").name is None


def test_os_error_parts_of_an_unavailable_backend_are_harmless() -> None:
    # ConnectionError is an OSError, which reads two arguments as errno and text.
    error = BackendUnavailable("no answer", name="x")
    assert str(error) == "no answer"
    assert error.errno is None


def test_copy_of_a_loss_is_another_object_that_says_the_same() -> None:
    lost = LockLost("gone", name="x", reason="gone")
    lost.add_note("while paying")
    again = copy.copy(lost)
    assert again is not lost
    again.add_note("in another thread")
    assert lost.__notes__ == ["while paying"]
    assert (str(again), again.name, again.reason) == ("gone", "x", "gone")


@pytest.mark.parametrize("timeout", [0, 0.2])
async def test_wait_that_a_store_refuses_for_now_ends_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    async def acquire(*_: object, **__: object) -> None:
        raise BackendUnavailable("the tables were emptied: closed for another 3 s")

    async with aiodlock.Client("memory://") as client:
        monkeypatch.setattr(KeptPlace, "acquire", acquire)
        with pytest.raises(BackendUnavailable, match="about 'x': the tables were emptied"):
            await client.lock("x").acquire(timeout=timeout)
