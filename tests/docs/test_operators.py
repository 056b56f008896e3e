"""What operators copy: units of systemd, scripts, a CronJob, alert rules and a dashboard."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY

from aiodlock import Client, LockLost, RequestInfo, otel
from aiodlock._embedded import find_valkey9

from ..scenes import STARTING
from ..servers import Store
from .pages import ROOT

FILES = ROOT / "examples" / "operators"
#: Where aiodlock is, for scripts that find it on the PATH.
HERE = str(Path(sys.executable).parent)


def exported() -> tuple[set[str], set[str]]:
    """Return the names and labels of all metrics of a client, as Prometheus shows them."""
    reader = PrometheusMetricReader()
    meters = MeterProvider([reader])
    client = Client("memory://")
    otel.instrument(client, meter_provider=meters, label=lambda name: name)
    (hooks,) = client._core.hooks
    request = RequestInfo("1", "lock", "orders", "exclusive", "t1", 0)
    granted = replace(request, id="2", token=7)
    lost = replace(granted, id="3")
    hooks.acquiring(request)
    hooks.not_acquired(request, 1.0, TimeoutError())
    for one in (granted, lost):
        hooks.acquiring(one)
        hooks.acquired(one, 0.5)
    hooks.extension_failed(granted, TimeoutError())
    hooks.release_failed(granted, TimeoutError())
    hooks.released(granted, 2.0)
    hooks.lost(lost, 2.0, LockLost("x", reason="expired").reason)
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    meters.shutdown()
    ours = [sample for sample in samples if sample.name.startswith("aiodlock")]
    return {sample.name for sample in ours}, {label for one in ours for label in one.labels}


@pytest.fixture(scope="module")
def metrics() -> tuple[set[str], set[str]]:
    return exported()


def rules() -> dict[str, str]:
    (group,) = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def panels() -> dict[str, str]:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """Parse an expression; return the metrics of aiodlock and the labels that it uses."""
    plain = expression.replace("$__rate_interval", "5m")
    text = promql_parser.parse(plain).prettify()
    names = set(re.findall(r"\baiodlock_\w+(?=[{\[\s)]|$)", re.sub(r'"[^"]*"', "", text)))
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", text)
    labels = set(re.findall(r"(\w+)\s*(?:=~|=|!=)\s*\"", text))
    labels |= {label.strip() for group in grouped for label in group.split(",")}
    return names - labels, labels


@pytest.mark.parametrize("title", [*rules(), *panels()])
def test_every_metric_and_label_that_is_asked_for_exists(
    metrics: tuple[set[str], set[str]], title: str
) -> None:
    names, labels = names_and_labels({**rules(), **panels()}[title])
    assert names, "asks for nothing of aiodlock"
    known_names, known_labels = metrics
    if any(name.startswith("aiodlock_run_") for name in names):
        known_names, known_labels = recorded()
    assert names <= known_names
    # Prometheus adds two labels of its own to each series.
    assert labels <= known_labels | {"job", "instance"}


@pytest.mark.parametrize("title", [*rules(), *panels()])
def test_first_value_of_a_counter_is_seen(title: str) -> None:
    """A counter whose series is new has not increased: what happens for the first time would be missed."""
    expression = " ".join({**rules(), **panels()}[title].split())
    for counter, time in re.findall(r"increase\(([^\[]+)\[([^\]]+)\]\)", expression):
        assert f"> 0 or ({counter} unless {counter} offset {time})" in expression


def test_every_metric_is_on_the_dashboard(metrics: tuple[set[str], set[str]]) -> None:
    shown = " ".join(panels().values())
    left_out = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in metrics[0]}
    assert not {name for name in left_out if name not in shown}


def test_page_of_metrics_has_the_names_that_prometheus_shows(
    metrics: tuple[set[str], set[str]],
) -> None:
    page = (ROOT / "docs/how-to/observability.md").read_text()
    shown = set(re.findall(r"`(aiodlock_[a-z_]+)`", page))
    bases = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in metrics[0]}
    assert bases <= shown
    assert shown <= metrics[0] | bases | metrics[1]


def recorded() -> tuple[set[str], set[str]]:
    script = (FILES / "record-exit.sh").read_text()
    found = re.findall(r"^(\w+)\{(\w+)=", script, re.MULTILINE)
    return {name for name, _ in found}, {label for _, label in found}


def test_units_are_accepted_by_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    for unit in FILES.glob("nightly-report.*"):
        # It looks for the programs: there has to be something in their place.
        text = re.sub(r"(?<==)/opt/\S+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    found = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    # A word that it does not know is only a warning.
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_exit_code_is_recorded_for_prometheus(tmp_path: Path) -> None:
    environment = {**os.environ, "TEXTFILES": str(tmp_path)}
    for code in ("76", "KILL", ""):
        command = [str(FILES / "record-exit.sh"), "nightly-report", code]
        subprocess.run(command, env=environment, check=True, timeout=60)
        (file,) = tmp_path.iterdir()  # none of a success
        assert file.name == "aiodlock_nightly-report.prom"
        expected = code if code.isdigit() else "255"
        assert f'aiodlock_run_exit_code{{name="nightly-report"}} {expected}\n' in file.read_text()


def test_last_success_stays_on_record_when_another_host_has_the_lock(tmp_path: Path) -> None:
    environment = {**os.environ, "TEXTFILES": str(tmp_path)}

    def record(code: str) -> str:
        command = [str(FILES / "record-exit.sh"), "nightly-report", code]
        subprocess.run(command, env=environment, check=True, timeout=60)
        return "".join(file.read_text() for file in tmp_path.iterdir())

    success = re.compile(
        r'^aiodlock_run_succeeded_seconds{name="nightly-report"} [0-9]+$', re.MULTILINE
    )
    (at,) = success.findall(record("0"))
    for code in ("75", "1"):
        told = record(code)
        assert success.findall(told) == [at]
        assert f'aiodlock_run_exit_code{{name="nightly-report"}} {code}\n' in told
    # The alert on a job that nobody has finished must not ask for hosts whose last code is 0: on the night
    # of a lock that is held for ever, there is none.
    names, _ = names_and_labels(rules()["LockedJobDidNotRun"])
    assert names == {"aiodlock_run_succeeded_seconds"}


@pytest.mark.stores("valkey9")
async def test_second_host_of_the_cron_job_ends_with_0_and_prints_nothing(store: Store) -> None:
    command, arguments = container()["command"], ["sh", "-c", "echo out; echo trouble >&2; exit 3"]
    command[command.index("--timeout") + 1] = "1"  # what a test can wait for
    environment = {**os.environ, "AIODLOCK_URL": store.url}

    def run() -> tuple[int, str, str]:
        assert command[0] == "aiodlock"
        done = subprocess.run(
            [f"{HERE}/aiodlock", *command[1:], *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=STARTING,
        )
        return done.returncode, done.stdout, done.stderr

    assert run() == (3, "out\n", "trouble\n")
    async with Client(store.url) as other, other.lock("nightly-report"):
        assert await asyncio.to_thread(run) == (0, "", "")


def container() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((FILES / "cronjob.yaml").read_text())
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.stores("valkey9")
async def test_pod_that_follows_a_killed_one_makes_the_report(store: Store) -> None:
    command = container()["command"]
    position = command.index("--timeout") + 1
    assert float(command[position]) >= 2 * 30  # the default ttl
    # The same with a ttl that a test can wait for.
    command[position] = "20"
    command[-1:] = ["--ttl", "4", "--"]
    environment = {**os.environ, "AIODLOCK_URL": store.url}

    def start(*report: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [f"{HERE}/aiodlock", *command[1:], *report],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    killed = start("sh", "-c", "echo begun; exec sleep 60")
    assert killed.stdout is not None
    assert await asyncio.to_thread(killed.stdout.readline) == "begun\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    successor = start("echo", "made")
    told, _ = await asyncio.to_thread(successor.communicate, timeout=STARTING)
    assert (successor.returncode, told) == (0, "made\n")


def leading() -> list[str]:
    """Return what the container of the Deployment runs."""
    deployment: dict[str, Any] = yaml.safe_load((FILES / "leader-deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command: list[str] = container["command"]
    return command


@pytest.mark.stores("valkey9")
async def test_second_pod_of_the_deployment_leads_when_the_first_one_is_ended(store: Store) -> None:
    environment = {**os.environ, "AIODLOCK_URL": store.url}

    def start(name: str) -> subprocess.Popen[str]:
        assert leading()[0] == "aiodlock"
        return subprocess.Popen(
            [f"{HERE}/aiodlock", *leading()[1:], "sh", "-c", f"echo {name}; exec sleep 60"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    pods = {}
    async with Client(store.url) as client:
        for name in ("first", "second"):
            pods[name] = start(name)
            async with asyncio.timeout(STARTING):
                while True:
                    info = await client.inspect("scheduler")
                    if len(info.holders) + len(info.waiters) == len(pods):
                        break
                    await asyncio.sleep(0.05)
        for name, pod in pods.items():  # as Kubernetes does it
            assert pod.stdout is not None
            assert await asyncio.to_thread(pod.stdout.readline) == f"{name}\n"
            pod.terminate()
            await asyncio.to_thread(pod.wait, STARTING)
            pod.stdout.close()


def test_deployment_ends_old_pods_before_it_starts_new_ones() -> None:
    deployment: dict[str, Any] = yaml.safe_load((FILES / "leader-deployment.yaml").read_text())
    spec = deployment["spec"]
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert spec["template"]["spec"]["shareProcessNamespace"] is True
    (container,) = spec["template"]["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["AIODLOCK_URL"]


def test_comments_are_seen_without_moving_sideways() -> None:
    for file in FILES.rglob("*"):
        if file.is_file():
            comments = re.findall(r"^\s*# .*", file.read_text(), re.MULTILINE)
            assert not [line for line in comments if len(line) > 88], file


KUBERNETES = [
    *re.findall(
        r"^```yaml title=[^\n]*\n(.*?)^```",
        (ROOT / "docs/how-to/kubernetes.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
]


@pytest.mark.parametrize("text", KUBERNETES, ids=range(len(KUBERNETES)))
def test_kubernetes_knows_each_field(text: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs the extra docs")
    for found in yaml.safe_load_all(text):
        schemas.validate(found, schemas.latest_version(), strict=True)
        wrong = found | {"spec": found["spec"] | {"replica": 1}}
        with pytest.raises(schemas.ValidationError):
            schemas.validate(wrong, schemas.latest_version(), strict=True)


COMPOSE = sorted((FILES / "compose").glob("*.yaml"))


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.stem)
def test_docker_compose_takes_the_file(file: Path) -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("this machine has no docker compose")
    subprocess.run([docker, "compose", "--file", file, "config", "--quiet"], check=True)


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.stem)
def test_compose_file_names_its_images_and_opens_ports_here_alone(file: Path) -> None:
    services: dict[str, Any] = yaml.safe_load(file.read_text())["services"]
    for service in services.values():
        assert re.search(r":v?[0-9]", service["image"])  # a version
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.stem)
def test_url_of_the_compose_file_leads_to_its_ports(file: Path) -> None:
    text = file.read_text()
    (url,) = re.findall(r"AIODLOCK_URL[=:]\s*(\S+)", text)
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    nodes = url if "," in url and url.count("://") > 1 else [url]
    nodes = nodes.split(",") if isinstance(nodes, str) else nodes
    Client(nodes if len(nodes) > 1 else nodes[0])  # it is a URL of ours
    opened = {port.split(":")[1] for one in services.values() for port in one.get("ports", [])}
    if opened:
        assert set(re.findall(r"localhost:(\d+)", url)) == opened
    else:  # reached from inside of the network
        assert set(re.findall(r"[/,]([a-z]+\d):", url)) <= set(services)


@pytest.mark.parametrize("name", ["valkey", "quorum"])
def test_server_takes_the_settings_of_the_compose_file(name: str, tmp_path: Path) -> None:
    services = yaml.safe_load((FILES / "compose" / f"{name}.yaml").read_text())["services"]
    service = next(iter(services.values()))
    _, *words = shlex.split(service["command"])
    program = find_valkey9()
    assert program is not None
    done = subprocess.Popen(
        [str(program), *words, "--port", "0", "--unixsocket", "socket"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout is not None
    try:
        for line in done.stdout:
            assert "FATAL" not in line
            if "Ready to accept connections" in line:
                break
        else:
            pytest.fail("the server ended")
    finally:
        done.terminate()
        done.wait()
        done.stdout.close()


def test_cron_job_of_kubernetes_says_what_the_page_says() -> None:
    job: dict[str, Any] = yaml.safe_load((FILES / "cronjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    inner = job["spec"]["jobTemplate"]["spec"]
    pod = inner["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy asks for
    report = container()
    (rule,) = inner["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == report["name"]
    assert rule["onExitCodes"]["values"] == [76]
    assert [variable["name"] for variable in report["env"]] == ["AIODLOCK_URL"]
