"""The package as somebody else gets it: wheel and sdist, installed into an empty environment; its
declared ranges.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import agentic_prompting
from support.marks import long

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = ROOT / "src" / "agentic_prompting"


def ran(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=240, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- what is declared -----------------------------------------------------------------------------


def test_one_version_everywhere():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert agentic_prompting.__version__ == PROJECT["version"] == cff["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab]|rc)?\d*", PROJECT["version"]), "semantic versioning"


def test_the_citation_file_is_one():
    """The fields that version 1.2.0 of the format requires, here and of every reference."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["cff-version"] == "1.2.0"
    assert cff["type"] == "software"
    assert cff["license"] == "Apache-2.0"
    for one in (cff, *cff["references"]):
        assert one["title"] and one["type"] in ("software", "article") and one["authors"]
        assert all(
            {"name"} <= set(author) or {"family-names", "given-names"} <= set(author)
            for author in one["authors"]
        )
    assert cff["message"] and len(cff["references"]) == 3
    for reference in cff["references"]:
        (identifier,) = reference["identifiers"]
        assert identifier["value"].removeprefix("arXiv:") in reference["url"]
        assert isinstance(reference["year"], int)


def test_the_lowest_versions_are_those_of_the_ranges():
    """`constraints-min.txt` names every runtime dependency, at the version its range begins with."""
    lines = (ROOT / "constraints-min.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    ranges = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, PROJECT["dependencies"])
    }
    assert set(lowest) == set(ranges)
    for name, specifier in ranges.items():
        (begins,) = [
            Version(version.version) for version in specifier if version.operator in (">=", "==")
        ]
        assert begins == Version(lowest[name]), (
            f"{name}: the range begins at {begins}, tested is {lowest[name]}"
        )


def test_what_the_tests_run_with_is_in_the_ranges():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        _name(line.split("==")[0]): line.split("==")[1]
        for line in lines
        if line and not line.startswith("#")
    }
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(pinned[_name(requirement.name)]), (
            f"{requirement.name}=={pinned[_name(requirement.name)]}"
        )


def test_vllms_environment_has_the_versions_that_the_tests_run_with():
    """All that both files pin, but for what vLLM holds back."""
    pinned = {}
    for file in ("constraints.txt", "requirements-vllm.txt"):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        pinned[file] = dict(line.split("==") for line in lines if not line.startswith("#"))
    ours, vllms = pinned.values()
    assert {name for name in ours.keys() & vllms.keys() if ours[name] != vllms[name]} == {"fastapi"}


def test_the_set_for_gpus_is_whole():
    """It pins vLLM, DeepSpeed and every runtime dependency within our ranges, with what TRL talks
    to.
    """
    lines = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {_name(name): version for name, version in pinned.items()}
    for requirement in map(
        Requirement, [*PROJECT["dependencies"], "deepspeed>=0.18.6", "vllm>=0.22,<=0.31"]
    ):
        assert requirement.specifier.contains(pinned[_name(requirement.name)]), requirement


def _name(project):
    return re.sub(r"[-_.]+", "-", project).lower()


# --- what is built --------------------------------------------------------------------------------


def beside():
    """What a wheel puts beside the package."""
    configs = ROOT / "examples" / "configs"
    tables = (ROOT / "benchmarks" / "paper_tables").rglob("*.py")
    return [*tables, *configs.glob("eval_*.yaml"), configs / "table.schema.json"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with wheel and sdist, built from a copy of what git would give: no build folder is
    left in the tree.
    """
    pytest.importorskip("build", reason="the extra [test] is not installed")
    copy = tmp_path_factory.mktemp("copy")
    out = tmp_path_factory.mktemp("dist")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "setup.cfg",
        "CHANGELOG.md",
        "CITATION.cff",
    ):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in (*SOURCE.rglob("*"), *beside()):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for name in (
        "runs/demo/config.json",
        "tests/test_x.py",
        "src/agentic_prompting/.env",
    ):  # nothing of these
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("x")
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy)
    return out


@pytest.mark.slow
def test_what_is_in_them(built):
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        told = Parser().parsestr(
            archive.read(next(n for n in inside if n.endswith("dist-info/METADATA"))).decode()
        )
    ours = {str(path.relative_to(SOURCE.parent)) for path in SOURCE.rglob("*") if _belongs(path)}
    tables = {str(path.relative_to(ROOT)) for path in beside()}
    shared = f"agentic_prompting-{PROJECT['version']}.data/data/share/agentic-prompting/"
    assert {name for name in inside if ".dist-info/" not in name} == ours | {
        shared + name for name in tables
    }
    assert "agentic_prompting/py.typed" in ours
    assert "agentic_prompting/report/page/main.js" in ours
    assert "agentic_prompting/trainers/card.md" in ours
    assert [name for name in inside if name.endswith("licenses/LICENSE")]
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        *(f"src/{name}" for name in ours),
        *tables,
    } <= packed
    assert not [name for name in packed if name.startswith("runs") or name.endswith(".env")]


@pytest.mark.slow
def test_an_index_would_take_them(built, tmp_path):
    """And what it would refuse, or show as one long block of code, is seen."""
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    try:
        from check_dist import check
    finally:
        sys.path.pop(0)
    assert check(built) == PROJECT["version"]
    for wrong, message in (
        ("Version: one", "'one' is invalid for 'version'"),
        ("Description-Content-Type: text/plain", "shown as plain text"),
        ("\n```\n", "is not closed"),
    ):
        (wheel,) = built.glob("*.whl")
        (sdist,) = built.glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith("METADATA"))
            told = archive.read(name).decode()
        key = wrong.partition(":")[0]
        told = re.sub(rf"^{key}:.*$", wrong, told, flags=re.M) if ":" in wrong else told + wrong
        with zipfile.ZipFile(tmp_path / wheel.name, "w") as archive:
            archive.writestr(name, told)
        with tarfile.open(tmp_path / sdist.name, "w:gz") as archive:
            (tmp_path / "PKG-INFO").write_text(told)
            archive.add(tmp_path / "PKG-INFO", f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        with pytest.raises(ValueError, match=message):
            check(tmp_path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_workflow_runs_what_there_is(path):
    """Nothing here runs them: what they name exists, and none can do more than it is for."""
    from support.doc_commands import commands_in, faults

    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step["uses"])
        for step in steps
        if "uses" in step
    )
    made = [
        command
        for step in steps
        for command in commands_in(step.get("run", ""))
        if command[0] == "make"
    ]
    assert made and not [fault for command in made for fault in faults(command)]
    assert "write" not in [
        level for what, level in flow["permissions"].items() if what not in ("pages", "id-token")
    ]
    assert flow[True], "when: `on`, which YAML 1.1 reads as true"


def _belongs(path):
    return path.is_file() and "__pycache__" not in path.parts and path.name != ".env"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The python of an empty environment with the wheel in it.

    Its dependencies are this environment's, by a .pth file: installing those is what `make
    test-min` and every clean clone try.
    """
    folder = tmp_path_factory.mktemp("empty") / "venv"
    ran(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    target = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    prefix = [
        "--prefix",
        folder,
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--quiet",
        "--ignore-installed",
    ]
    ran(sys.executable, "-m", "pip", "--python", python, "install", *prefix[2:], wheel)
    (Path(target) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def clean():
    """An environment in which nothing of the checkout is found."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
def test_installed_into_an_empty_environment(installed, tmp_path):
    where = ran(
        installed,
        "-c",
        "import agentic_prompting as a; print(a.__file__)",
        cwd=tmp_path,
        env=clean(),
    ).strip()
    assert Path(where).is_relative_to(installed.parents[1]), "the wheel, not the checkout"
    command = installed.parent / "agentic-prompting"
    assert ran(command, "--version", cwd=tmp_path, env=clean()).split() == [
        "agentic-prompting",
        PROJECT["version"],
    ]
    told = ran(command, "--help", cwd=tmp_path, env=clean())
    assert all(name in told for name in ("report", "serve", "evaluate", "refine"))
    page = (
        "from agentic_prompting.report.page import render_page;from agentic_prompting.evolution "
        "import Population, SystemPrompt; assert 'showEvolution' in render_page('t', '')"
    )
    ran(installed, "-c", page, cwd=tmp_path, env=clean())


@pytest.mark.timeout(900)
@long
def test_a_table_is_filled_and_reported_without_a_clone(installed, tmp_path):
    command = installed.parent / "agentic-prompting"
    config = "examples/configs/eval_prorefine_table1.yaml"
    process = ran(
        command,
        "evaluate",
        "--config",
        config,
        "--sandbox",
        "--output-dir",
        "table",
        cwd=tmp_path,
        env=clean(),
    )
    assert "prorefine_verifier" in process and "written to" in process
    page = ran(command, "report", "table", "--no-pictures", cwd=tmp_path, env=clean()).strip()
    assert page == "table/report/index.html" and (tmp_path / page).is_file()


@pytest.mark.slow
def test_the_installed_front_door_is_light(installed, tmp_path):
    """No torch, no trl, and few modules, of which the time of an import consists."""
    code = (
        "import sys; before = len(sys.modules); import agentic_prompting; "
        "heavy = {'torch', 'trl', 'transformers', 'openai', 'datasets'} & set(sys.modules); "
        "print(len(sys.modules) - before, *heavy)"
    )
    modules, *heavy = ran(installed, "-c", code, cwd=tmp_path, env=clean()).split()
    assert not heavy, "loaded by the bare import"
    assert int(modules) < 150


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_keeps_the_run_of_before(tmp_path):
    """Aside and said so, never removed without a word; compute threads do not spin while they wait."""
    for name in ("constraints.txt", "pyproject.toml"):  # first: the stamps have to be newer
        (tmp_path / name).touch()
    accelerate = tmp_path / ".venv" / "bin" / "accelerate"
    accelerate.parent.mkdir(parents=True)
    accelerate.write_text(
        "#!/bin/sh\nmkdir -p runs/demo && echo threads $OMP_NUM_THREADS $OMP_WAIT_POLICY\n"
    )
    accelerate.chmod(0o755)
    (accelerate.parent / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (accelerate.parent / "python").chmod(0o755)
    for stamp in (".torch", ".demo"):
        (tmp_path / ".venv" / stamp).touch()
    said = []
    for run in ("first", "second", "third"):
        said.append(
            subprocess.check_output(
                ["make", "-f", ROOT / "Makefile", "demo"], cwd=tmp_path, text=True
            )
        )
        (tmp_path / "runs" / "demo" / "summary.json").write_text(run)
    assert "runs/demo.previous" not in said[0] and "runs/demo.previous" in said[1]
    assert (tmp_path / "runs" / "demo.previous" / "summary.json").read_text() == "second"
    assert "threads 1 passive" in said[2]
