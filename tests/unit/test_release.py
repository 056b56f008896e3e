"""What a release needs besides code: one version everywhere, links, and a workflow that compares them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_changelog_has_the_version_or_what_comes_after_it() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == PROJECT["version"]
    assert headings.index(released[0]) <= 1


def test_package_links_to_its_repository_and_changes() -> None:
    assert {"Documentation", "Repository", "Issues", "Changelog"} <= set(PROJECT["urls"])
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert f">={versions[0]}" == PROJECT["requires-python"]


def test_release_publishes_only_what_has_passed_and_bears_its_version() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    commands = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert 'test "v$version" = "$GITHUB_REF_NAME"' in commands
    assert ".ci/run" in commands
    assert "make dist" in (ROOT / ".ci/run").read_text()
