"""Files that other services read: workflows, the image, the devcontainer, the citation. They name what is there."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparseforge_ds.cli.main import parser as all_commands

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
TESTED = re.search(r"\(Python (3\.\d+)\)", (ROOT / "constraints.txt").read_text())
OPTIONS = {"tests/run.sh": {"--fast", "--core"}}
"""Options of our scripts."""


def _load(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.BaseLoader)  # texts alone: PyYAML takes the key `on` for true


def _check_command(line: str) -> None:
    """Assert that a shell command names files, extras and subcommands of this repository."""
    words = shlex.split(line.replace("$(", " ").replace(')"', '"'), comments=True)
    for word in words:
        if word.startswith((".[", "dist/")) or re.fullmatch(r"[\w./-]+\.(sh|txt|toml|py)", word):
            name, _, extras = word.partition("[")
            assert word.startswith("dist/") or (ROOT / name).exists(), f"{line}: no {name}"
            for extra in filter(None, extras.rstrip("]").split(",")):
                assert extra in PROJECT["optional-dependencies"], f"{line}: no extra {extra}"
    for script, options in OPTIONS.items():
        if script in words:
            assert set(words[words.index(script) + 1 :]) <= options, line
    if words and Path(words[0]).name == "sparseforge" and words[1] != "--version":
        top = all_commands()
        (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
        assert words[1] in commands.choices, line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(path):
    workflow = _load(path)
    assert workflow.keys() >= {"name", "on", "permissions", "jobs"} and workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"].startswith("ubuntu-") and job["steps"], name
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert len(step.keys() & {"uses", "run"}) == 1 and step.keys() <= {"name", "uses", "with", "run", "env"}
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"]), "a version is given"
            for line in step.get("run", "").splitlines():
                _check_command(line)
            python = step.get("with", {}).get("python-version", TESTED[1])
            assert python == TESTED[1] or python == "${{ matrix.python }}"
        matrix = job.get("strategy", {}).get("matrix", {})
        assert matrix.get("python", PYTHONS) == PYTHONS, "every supported Python, and no other"


def test_a_release_is_published_without_a_token():
    release = _load(ROOT / ".github" / "workflows" / "release.yml")
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert publish["needs"] == "build" and release["on"] == {"push": {"tags": ["v*"]}}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    uploaded, fetched = (
        next(step["with"] for step in job["steps"] if action in step.get("uses", ""))
        for job, action in ((release["jobs"]["build"], "upload-artifact"), (publish, "download-artifact"))
    )
    assert uploaded == fetched
    # The step that compares the tag searches for this line.
    assert f'version = "{PROJECT["version"]}"' in (ROOT / "pyproject.toml").read_text().splitlines()


def test_the_site_is_built_as_readthedocs_wants_it():
    config = _load(ROOT / ".readthedocs.yaml")
    assert config["version"] == "2" and config["build"]["os"].startswith("ubuntu-")
    assert config["build"]["tools"] == {"python": TESTED[1]}
    assert (ROOT / config["mkdocs"]["configuration"]).is_file()
    assert config["build"]["jobs"].keys() <= {"pre_install", "install"}
    for commands in config["build"]["jobs"].values():
        for command in commands:
            _check_command(command)


def test_the_citation_has_what_the_format_requires():
    citation = _load(ROOT / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # required by the schema of 1.2.0
    assert citation["cff-version"] == "1.2.0"
    person = {"name", "family-names", "given-names", "orcid"}
    for work in (citation, *citation.get("references", [])):
        assert work["title"] and work["type"] in ("software", "dataset", "article")
        assert work["authors"] and all(author.keys() <= person for author in work["authors"])
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]


def _dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def test_the_image_is_made_of_what_is_there():
    instructions = _dockerfile()
    assert {word for word, _ in instructions} <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    for word, rest in instructions:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        elif word == "RUN":
            for command in rest.split("&&"):
                _check_command(command)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {source for word, rest in instructions if word == "COPY" for source in rest.split()[:-1]}
    assert not copied & set(ignored), "the build needs them"


def test_the_base_of_the_image_has_our_versions():
    """Ubuntu's Python is one of ours, and torch is built for the CUDA of the base."""
    text = (ROOT / "Dockerfile").read_text()
    of_ubuntu = {"22.04": "3.10", "24.04": "3.12"}
    bases = re.findall(r"^FROM .*ubuntu[:]?(\d+\.\d+)", text, flags=re.MULTILINE)
    assert len(bases) == 2 and all(of_ubuntu[base] in PYTHONS for base in bases)
    (cuda,) = re.findall(r"^FROM nvidia/cuda:(\d+)\.(\d+)[\d.]*-devel", text, flags=re.MULTILINE)
    assert f"whl/cu{''.join(cuda)}\n" in text
    assert re.search(r"^torch==\d", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)


def test_the_devcontainer_is_a_stage_of_the_image():
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text())
    build = container["build"]
    assert (folder / build["dockerfile"]).samefile(ROOT / "Dockerfile") and (folder / build["context"]).samefile(ROOT)
    instructions = _dockerfile()
    stages = {rest.split()[-1] for word, rest in instructions if word == "FROM"}
    assert build["target"] in stages
    arguments = {rest.partition("=")[0] for word, rest in instructions if word == "ARG"}
    assert build["args"].keys() <= arguments and f"system-{build['args']['DEVICE']}" in stages
    _check_command(container["postCreateCommand"])
