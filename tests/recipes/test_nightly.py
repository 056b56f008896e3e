"""The complete recipe for cron, as operators copy it: twenty periods on three hosts, faster than the clock.

The period is what ``date`` says, and the test says that. So nothing waits for a tick, however busy the
machine is.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..servers import Store

pytestmark = [pytest.mark.stores("valkey9"), pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "examples" / "operators" / "nightly.sh"
PERIODS, HOSTS = 20, 3
#: Every third period the job fails on the first host that tries it; in one it fails everywhere.
FAILS, FAILS_EVERYWHERE = 3, 11
#: In every fourth period, the last host's clock is so late that the job has ended when it starts.
LATE = 4

#: Fails the first time in some periods, notes who runs beside it, and says what it has done.
JOB = """#!/bin/sh
cd "$(dirname "$0")" && period=$(date)
mkdir running || echo "two at once in $period" >> overlaps
echo "$period" >> tried
fails=1
case $period in (*-everywhere) fails=3;; (*-fails) ;; (*) fails=0;; esac
code=0
test "$(grep -c "^$period\\$" tried)" -gt $fails || code=4
test $code = 4 || echo "$period" >> done
rmdir running
exit $code
"""


def install(folder: Path) -> None:
    """Put the recipe, its job and what it calls into a folder."""
    aiodlock = f"'{sys.executable}' -m aiodlock"
    text = SCRIPT.read_text().replace("/opt/locks/bin/aiodlock", f"{folder}/aiodlock")
    files = {
        "nightly.sh": text.replace("/opt/jobs", str(folder)),
        "aiodlock": f'#!/bin/sh\nexec {aiodlock} "$@"\n',
        "record-exit.sh": f'#!/bin/sh\ntest "$2" = 0 || echo "$PERIOD" >> {folder}/alerts\n',
        "date": '#!/bin/sh\necho "$PERIOD"\n',
        "report.sh": JOB,
    }
    for name, content in files.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(("away", "tries"), [(2, 3), (60, 60)])
def test_store_that_is_away_when_the_job_starts_is_tried_again(
    tmp_path: Path, away: int, tries: int
) -> None:
    install(tmp_path)
    (tmp_path / "aiodlock").write_text(
        f"""#!/bin/sh
echo "$2" >> {tmp_path}/tries
test "$(wc -l < {tmp_path}/tries)" -gt {away} || exit 69
"""
    )
    environment = {
        "AIODLOCK_URL": "redis://locks",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PERIOD": "1",
        "RETRY_AFTER": "0",
    }
    script = [str(tmp_path / "nightly.sh")]
    done = subprocess.run(script, env=environment, check=False, timeout=60)
    assert done.returncode == (0 if tries > away else 69)
    assert lines(tmp_path / "tries") == ["nightly-report:1"] * tries
    assert lines(tmp_path / "alerts") == ([] if tries > away else ["1"])  # once, at the end


def test_host_that_was_told_no_store_runs_nothing_and_alerts(tmp_path: Path) -> None:
    """By default, `aiodlock` asks localhost: each host would lock a server of its own, and run the job."""
    install(tmp_path)
    (tmp_path / "aiodlock").write_text(f"#!/bin/sh\necho ran >> {tmp_path}/ran\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PERIOD": "1"}
    script = [str(tmp_path / "nightly.sh")]
    done = subprocess.run(script, env=environment, check=False, timeout=60, capture_output=True)
    assert b"AIODLOCK_URL" in done.stderr
    assert done.returncode == 2
    assert lines(tmp_path / "ran") == []
    assert lines(tmp_path / "alerts") == ["1"]


@pytest.mark.parametrize("options", ["", "?ssl_ca_certs=ca.pem&ssl_check_hostname=true"])
def test_line_of_the_environment_is_read_by_a_shell_as_it_is_written(
    tmp_path: Path, options: str
) -> None:
    """Without the quotes of the page, a shell takes the `&` of two options for the end of a command."""
    page = (SCRIPT.parents[2] / "docs" / "how-to" / "command-line.md").read_text()
    line = next(word for word in page.split("`") if word.startswith("AIODLOCK_URL='"))
    url = f"rediss://locks:PASSWORD@redis:6379/0{options}"
    (tmp_path / "env").write_text(line.replace("redis://…", url) + "\n")
    read = f"set -a; . {tmp_path}/env; set +a; printenv AIODLOCK_URL"
    done = subprocess.run(["sh", "-c", read], check=False, capture_output=True, text=True)
    assert done.stdout == f"{url}\n"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.long
async def test_recipe_runs_once_in_each_of_twenty_periods_and_again_where_it_failed(
    store: Store, tmp_path: Path
) -> None:
    install(tmp_path)

    async def host(period: str) -> tuple[int | None, bytes]:
        process = await asyncio.create_subprocess_exec(
            str(tmp_path / "nightly.sh"),
            env={
                **os.environ,
                "AIODLOCK_URL": store.url,
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "PERIOD": period,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return process.returncode, out

    for number in range(PERIODS):
        kind = (
            "everywhere" if number == FAILS_EVERYWHERE else "fails" if not number % FAILS else "ok"
        )
        period = f"{number}-{kind}"
        late = number % LATE == 0
        ended = await asyncio.gather(*(host(period) for _ in range(HOSTS - late)))
        ended += [await host(period)] if late else []
        failures = {"ok": 0, "fails": 1, "everywhere": HOSTS}[kind]
        assert sorted(ended) == [(0, b"")] * (HOSTS - failures) + [(4, b"")] * failures, period
        assert lines(tmp_path / "done").count(period) == (0 if kind == "everywhere" else 1)
        assert lines(tmp_path / "tried").count(period) == min(failures + 1, HOSTS)
        assert lines(tmp_path / "alerts").count(period) == failures
    assert lines(tmp_path / "overlaps") == []
