"""What the texts and settings around the code promise must be true of the code."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from reprise.cli import app
from reprise.surroundings import DEFAULTS

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md", "docker/README.md", "docs/pytorch.md", "docs/recipes.md")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Folders and files that exist only after a run; the README's map must not call them part of the repository.
MADE = re.compile(r"^(runs|release|mlartifacts|\.venv|mlflow\.db|data/(raw|split|encoded))")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_of(page: str) -> list[str]:
    """The lines of a page's fenced shell blocks, without comments, and its inline code."""
    text = read(page)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*filter(None, lines), *re.findall(r"`([^`\n]+)`", without_blocks)]


def commands(page: str, program: str) -> list[list[str]]:
    """The arguments of every call of ``program`` in a page."""
    parts = [part for code in code_of(page) for part in re.split(r"&&|\||;", code)]
    words = [shlex.split(part) for part in parts if re.match(rf"\s*(\w+=\S+\s+)*{program}(\s|$)", part)]
    return [call[call.index(program) + 1 :] for call in words]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))


def stage_dependencies() -> set[str]:
    stages = yaml.safe_load(read("dvc.yaml"))["stages"].values()
    made = {name for stage in stages for out in stage["outs"] for name in ([out] if isinstance(out, str) else out)}
    return {dependency for stage in stages for dependency in stage["deps"]} - made


# --------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("page", PAGES)
def test_make_commands_of_a_page_are_targets(page: str) -> None:
    called = {word for call in commands(page, "make") for word in call if "=" not in word}
    assert called <= make_targets()


def test_the_readme_names_the_two_commands_and_contributing_the_checks() -> None:
    assert {("rebuild",), ("test",)} <= {tuple(call) for call in commands("README.md", "make")}
    assert {("check",), ("test",)} <= {tuple(call) for call in commands("CONTRIBUTING.md", "make")}


@pytest.mark.parametrize("page", PAGES)
def test_reprise_commands_of_a_page_exist_with_their_options(page: str) -> None:
    for call in commands(page, "reprise"):
        command: Any = get_command(app)
        for word in call:
            if word.startswith("-"):
                known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
                assert word in known, f"{page}: reprise {' '.join(call)}"
            elif hasattr(command, "commands"):
                assert word in command.commands, f"{page}: reprise {' '.join(call)}"
                command = command.commands[word]


def test_every_command_and_stage_is_shown_somewhere() -> None:
    shown = {word for page in PAGES for call in commands(page, "reprise") for word in call}
    assert {"predict", "recipes", "runs", "train"} <= shown
    stages = yaml.safe_load(read("dvc.yaml"))["stages"]
    assert set(stages) <= set(re.findall(r"\w+", read("README.md")))


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_resolve(page: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", read(page))
    local = [target.partition("#")[0] for target in targets if not re.match(r"https?://", target)]
    missing = [target for target in local if target and not ((ROOT / page).parent / target).exists()]
    assert missing == []


def test_the_map_names_what_is_there_and_all_of_the_package() -> None:
    section = read("README.md").partition("## Map")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert [name for name in sorted(named) if MADE.match(name) or not (ROOT / name).exists()] == []
    rooms = {f"src/reprise/{path.name}/" for path in (ROOT / "src/reprise").iterdir() if (path / "__init__.py").exists()}
    assert rooms <= named


def test_every_idea_of_the_lesson_points_to_code_and_to_a_test_that_exist() -> None:
    rows = [line.split("|")[1:-1] for line in read("docs/pytorch.md").splitlines() if line.startswith("| ") and ": test_" in line]
    assert len(rows) > 30
    for idea, where, test in rows:
        for folder, cell in (("src/reprise", where), ("tests", test)):
            pointers = re.findall(r"`([\w/]+\.py): (\w+)`", cell)
            assert pointers, f"{idea}: no pointer in {cell}"
            for file, name in pointers:
                assert re.search(rf"^(def|class) {name}\b", read(f"{folder}/{file}"), re.MULTILINE), f"{idea}: {file}: {name}"


def test_no_placeholder_is_left_in_a_page() -> None:
    assert [page for page in PAGES if re.search(r"TODO|FIXME|XXX", read(page))] == []


def test_the_changelog_is_headed_by_unreleased_and_knows_this_version() -> None:
    headings = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert tomllib.loads(read("pyproject.toml"))["project"]["version"] in headings


def test_decisions_are_dated_newest_first() -> None:
    headings = re.findall(r"^## (.*)$", read("DECISIONS.md"), re.MULTILINE)
    dates = [heading[:10] for heading in headings]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates, reverse=True)


# ------------------------------------------------------------------------------------------------------------- automation


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    tree = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    return [step for job in tree["jobs"].values() for step in job["steps"]]


def test_there_is_a_workflow() -> None:
    assert [path.name for path in WORKFLOWS] != []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_make_targets_only(workflow: Path) -> None:
    lines = [line for step in steps_of(workflow) for line in step.get("run", "").splitlines()]
    assert lines != []
    assert [line for line in lines if not (m := re.fullmatch(r"make ([a-z-]+)", line)) or m[1] not in make_targets()] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_least_rights_limits_and_pinned_actions(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    assert tree["permissions"] == {"contents": "read"}
    assert "concurrency" in tree
    assert all("timeout-minutes" in job and "permissions" not in job for job in tree["jobs"].values())
    used = re.findall(r"uses: (.*)$", text, re.MULTILINE)
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)] == []
    checkouts = [step for step in steps_of(workflow) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_ci_tests_every_supported_python() -> None:
    tree = yaml.safe_load(read(".github/workflows/ci.yml"))
    assert tree["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_pre_commit_hooks_are_local_and_are_what_make_check_runs() -> None:
    repositories = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert {repository["repo"] for repository in repositories} == {"local"}
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    recipe = read("Makefile").partition("\ncheck:")[2].partition("\n\n")[0]
    tools = {hook["entry"].removeprefix(".venv/bin/").split(" --")[0] for hook in hooks}
    assert all(re.search(rf"^\t{re.escape(tool)}\b", recipe, re.MULTILINE) for tool in tools)
    assert tools == {"ruff format", "ruff check", "mypy", "lint-imports"}


# -------------------------------------------------------------------------------------------------------------- container


def test_the_image_sets_what_surroundings_sets() -> None:
    image = dict(re.findall(r"^(?:ENV| {3,}) *([A-Z_]+)=(\S+)", read("docker/Dockerfile"), re.MULTILINE))
    assert {name: image.get(name) for name in DEFAULTS} == DEFAULTS


def test_the_image_runs_without_rights_and_installs_from_the_lock() -> None:
    text = read("docker/Dockerfile")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["${UID}:${GID}"]
    assert "-c requirements.lock -e '.[train,pretrained]'" in text
    assert not re.search(r"^# *syntax *=", text, re.MULTILINE)


def test_the_build_context_is_an_allow_list_that_holds_what_the_stages_read() -> None:
    lines = [line for line in read("docker/Dockerfile.dockerignore").splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed = stage_dependencies() | {"dvc.yaml", "params.yaml", ".dvc/config", ".dvcignore", "recipes", "README.md", "LICENSE"}
    assert [
        name
        for name in sorted(needed)
        if not any(f"{a}/".startswith(f"{name}/") or f"{name}/".startswith(f"{a}/") for a in allowed)
    ] == []
    assert not any(re.match(r"\.git|\.venv|runs|release|mlflow", name) for name in allowed)
