"""Installation: the supported versions, the environment of `make`, the constraints."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.requirements import run_fresh

ROOT = Path(__file__).parent.parent
PYPROJECT_TEXT = (ROOT / "pyproject.toml").read_text()
PYPROJECT = tomllib.loads(PYPROJECT_TEXT)
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def load(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / f"{name}.py")))


setup_env = load("setup_env")
check_constraints = load("check_constraints")


# ---- what is supported, stated once -------------------------------------------------------------


def test_one_oldest_python() -> None:
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert setup_env.oldest_python(PYPROJECT_TEXT) == tuple(map(int, oldest.split(".")))
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"Python (3\.\d+) or newer", readme)) == {oldest}
    first, *_ = re.findall(r"Tested with Python (3\.\d+)", readme)
    assert first == oldest


def test_readme_states_the_bounds_of_torch() -> None:
    bounds = re.search(r'"torch>=(\d+\.\d+),<2\.(\d+)"', PYPROJECT_TEXT)
    assert bounds is not None
    last = f"2.{int(bounds[2]) - 1}"
    for page in ("README.md", "docs/index.md"):
        assert f"PyTorch {bounds[1]} to {last}" in (ROOT / page).read_text(), page


def test_every_dependency_is_bounded_and_pinned() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", CONSTRAINTS, re.M))
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    for requirement in sum(extras, PYPROJECT["project"]["dependencies"]):
        if not requirement.startswith("moe-tile-kernels["):
            bounded = re.fullmatch(r"([\w-]+)>=[\d.]+,<[\d.]+", requirement)
            assert bounded, requirement
            assert bounded[1] in pinned, requirement


# ---- the environment of make --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.9.1+cu128", False),
        ("2.10.0a0+git1234", False),
        ("2.10.0", True),
        ("2.11.0+cu130", True),
        ("2.12.0a0+git1234", True),
        ("2.13.1+cpu", True),
        ("2.14.0", False),
        ("2.14.0.dev20260801", False),
        ("3.0.0", False),
    ],
)
def test_supported_torch(version: str, supported: bool) -> None:
    assert setup_env.supports_torch('"torch>=2.10,<2.14"', version) is supported


def test_constraints_follow_the_installed_torch() -> None:
    pinned = setup_env.pinned_torch(CONSTRAINTS).removeprefix("torch==")
    assert setup_env.adapt_constraints(CONSTRAINTS, pinned) == CONSTRAINTS
    cpu = setup_env.adapt_constraints(CONSTRAINTS, f"{pinned}+cpu")
    assert cpu == CONSTRAINTS.replace(f"torch=={pinned}", f"torch=={pinned}+cpu")
    for version in ("2.11.0+cu130", f"{pinned}+cu132"):
        other = setup_env.adapt_constraints(CONSTRAINTS, version)
        assert f"\ntorch=={version}\n" in other
        assert "nvidia-" not in other
        assert "\ntilelang==" in other


class FakePip:
    """Records the commands of `setup_env` instead of running them; some install a fake PyTorch."""

    def __init__(self, installs: str = "2.13.0") -> None:
        self.installs = installs
        self.commands: list[list[str]] = []

    def __call__(self, *command: Any) -> None:
        words = [str(word) for word in command]
        if words[1:3] == ["-m", "venv"]:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", words[-1]], check=True)
        else:
            assert words[1:4] == ["-m", "pip", "install"]
            self.commands.append(words[4:])
            if len(words) == 5:  # PyTorch alone
                (site_packages,) = Path(words[0]).parent.parent.glob("lib/python*/site-packages")
                write_torch(site_packages, self.installs)


# What `setup_env` finds in the other environment, beside PyTorch.
OUTER_RUFF = "import sys; assert 'ruff' in sys.argv and 'torch' not in sys.argv; print('ruff==1')"


def write_torch(site_packages: Path, version: str) -> None:
    (site_packages / "torch").mkdir(parents=True, exist_ok=True)
    (site_packages / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`set_up(pip, outer, requested)`: with `outer` as the PyTorch of the interpreter, if any."""
    functions = setup_env.set_up.__globals__
    probe = functions["probe"]
    outer_packages = tmp_path / "outer" / "site-packages"

    def call(pip: FakePip, outer: str | None = None, requested: str | None = None) -> Path:
        venv: Path = tmp_path / "venv"

        def fake_probe(python: Path) -> Any:
            if str(python) != sys.executable:
                return probe(python)
            path = str(outer_packages / "torch")
            torch = setup_env.Torch(outer, path, [str(outer_packages)]) if outer else None
            return sys.version_info[:2], torch

        if outer:
            write_torch(outer_packages, outer)
        monkeypatch.setitem(functions, "probe", fake_probe)
        monkeypatch.setitem(functions, "run", pip)
        monkeypatch.setitem(functions, "LIST_OUTER", "" if not outer else OUTER_RUFF)
        setup_env.set_up(venv, requested)
        return venv

    return call


def test_without_torch_the_pinned_one_is_installed(set_up: Any) -> None:
    pip = FakePip("2.13.0+cpu")
    venv = set_up(pip)
    pinned = setup_env.pinned_torch(CONSTRAINTS)
    packages = ["-c", str(venv / "constraints.txt"), "-e", f"{ROOT}[dev]"]
    assert pip.commands == [[pinned], packages]
    assert "\ntorch==2.13.0+cpu\n" in (venv / "constraints.txt").read_text()
    pip.commands.clear()
    set_up(pip)  # a second time, only the packages
    assert pip.commands == [packages]


def test_an_installed_torch_is_reused(set_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pip = FakePip()
    venv = set_up(pip, outer="2.11.0+cu130")
    assert "reusing PyTorch 2.11.0+cu130" in capsys.readouterr().out
    packages, copied = pip.commands
    assert packages[0] == "-c"
    assert copied == ["--ignore-installed", "--no-deps", "ruff==1"]
    assert "\ntorch==2.11.0+cu130\n" in (venv / "constraints.txt").read_text()
    _, torch = setup_env.probe(venv / "bin" / "python")
    assert torch.version == "2.11.0+cu130"
    pip.commands.clear()
    set_up(pip, outer="2.11.0+cu130")
    assert pip.commands == [packages, copied]


def test_packages_of_another_environment_are_found(tmp_path: Path) -> None:
    for folder, name in (("outer", "ruff"), ("inner", "mypy")):
        (tmp_path / folder / f"{name}-1.dist-info").mkdir(parents=True)
        (tmp_path / folder / f"{name}-1.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        )
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    code = (
        f"import sys; sys.prefix = {str(inner)!r}; sys.path[:0] = [{str(inner)!r}, {str(outer)!r}]"
    )
    found = run_fresh(f"{code}; sys.argv[1:] = ['ruff', 'mypy']\n{setup_env.LIST_OUTER}")
    assert found == "ruff==1"


def test_an_unsupported_torch_is_not_reused(
    set_up: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip()
    set_up(pip, outer="2.9.0")
    assert "PyTorch 2.9.0" in capsys.readouterr().out
    assert pip.commands[0] == [setup_env.pinned_torch(CONSTRAINTS)]


def test_a_broken_torch_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    venv = tmp_path / "venv"
    FakePip("2.13.0")(sys.executable, "-m", "venv", venv)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "torch.py").write_text("raise OSError('libcudart.so: not found')")
    assert setup_env.probe(venv / "bin" / "python") == (sys.version_info[:2], None)
    assert "cannot import torch: libcudart.so: not found" in capfd.readouterr().err


def test_a_requested_torch_is_installed(set_up: Any) -> None:
    pip = FakePip("2.12.0+cpu")
    venv = set_up(pip, outer="2.11.0+cu130", requested="wheels/torch.whl")
    assert pip.commands[0] == ["wheels/torch.whl"]
    assert "\ntorch==2.12.0+cpu\n" in (venv / "constraints.txt").read_text()
    with pytest.raises(setup_env.SetupError, match=r"PyTorch 2\.9\.0 is not supported"):
        set_up(FakePip("2.9.0"), requested="torch==2.9.0")


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(setup_env.set_up.__globals__, "oldest_python", lambda _: (3, 99))
    with pytest.raises(
        setup_env.SetupError, match=r"Python 3\.99 or newer is required, .*make PYTHON"
    ):
        setup_env.set_up(tmp_path / "venv", None)
    assert not (tmp_path / "venv").exists()


def test_output_of_a_failing_command_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('Collecting'); sys.exit('the conflict is caused by x')"
    with pytest.raises(setup_env.SetupError, match="failed with status 1"):
        setup_env.run(sys.executable, "-c", code)
    shown = capfd.readouterr()
    assert "Collecting" in shown.out
    assert "the conflict is caused by x" in shown.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "python3 tools/setup_env.py"),
        (["PYTHON=python9"], "python9 tools/setup_env.py"),
        (["TORCH=torch==2.12.0"], "python3 tools/setup_env.py --torch 'torch==2.12.0'"),
    ],
)
def test_make_passes_its_variables(arguments: list[str], expected: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in [line.rstrip() for line in done.stdout.splitlines()]


# ---- the constraints ----------------------------------------------------------------------------


def write_wheel(index: Path, name: str, version: str, *requirements: str) -> None:
    """An empty wheel in a folder that pip can use as an index."""
    module = name.replace("-", "_")
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requirements]
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    links = [f'<a href="{file.name}">{file.name}</a>' for file in folder.glob("*.whl")]
    (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "".join(links))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with a PyTorch that requires CUDA 13.0, and two releases of CUDA."""
    folder = tmp_path / "index"
    write_wheel(folder, "torch", "2.13.0", "cuda-toolkit==13.0")
    write_wheel(folder, "cuda-toolkit", "13.0", "nvidia-cuda-runtime==13.0.*")
    for version in ("13.0.96", "13.4.92"):
        write_wheel(folder, "nvidia-cuda-runtime", version)
    monkeypatch.setenv("PIP_INDEX_URL", folder.as_uri())
    return folder


def resolve(tmp_path: Path, constraints: str) -> dict[str, str]:
    path = tmp_path / "constraints.txt"
    path.write_text(constraints)
    versions: dict[str, str] = check_constraints.resolve(["torch", "nvidia-cuda-runtime"], path)
    return versions


def test_constraints_that_fit_resolve(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = tmp_path / "cpu"  # settings of pip must not replace the wheel of the index
    write_wheel(cpu, "torch", "2.13.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cpu / "torch"))
    versions = resolve(tmp_path, "torch==2.13.0\nnvidia-cuda-runtime==13.0.96\n")
    expected = {"torch": "2.13.0", "cuda-toolkit": "13.0", "nvidia-cuda-runtime": "13.0.96"}
    assert versions == expected
    check_constraints.check_cuda(versions)


def test_constraints_in_conflict_are_reported(index: Path, tmp_path: Path) -> None:
    with pytest.raises(check_constraints.CheckError) as caught:
        resolve(tmp_path, "torch==2.13.0\nnvidia-cuda-runtime==13.4.92\n")
    assert caught.value.status == check_constraints.CONFLICT
    assert "nvidia-cuda-runtime==13.0.*" in str(caught.value)
    assert "nvidia-cuda-runtime==13.4.92" in str(caught.value)


def test_an_index_out_of_reach_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(check_constraints.CheckError, match="cannot be reached") as caught:
        resolve(tmp_path, "torch==2.13.0\n")
    assert caught.value.status == check_constraints.UNKNOWN


def test_a_torch_without_cuda_is_no_check() -> None:
    for versions in ({"torch": "2.13.0+cpu", "cuda-toolkit": "13.0"}, {"torch": "2.13.0"}):
        with pytest.raises(check_constraints.CheckError, match="not the CUDA wheel"):
            check_constraints.check_cuda(versions)


def test_ci_checks_the_constraints() -> None:
    assert "tools/check_constraints.py" in (ROOT / ".ci" / "run").read_text()


# ---- the release --------------------------------------------------------------------------------

dist = load("dist")


def test_a_version_needs_a_heading() -> None:
    text = "# Changes\n\n## 0.2.0, unreleased\n\n## 0.1.0, 2026-11-18\n"
    dist.check_changelog(text, "0.2.0", False)
    dist.check_changelog(text, "0.1.0", True)
    with pytest.raises(dist.DistError, match=r"says 'unreleased' for 0\.2\.0, not a date"):
        dist.check_changelog(text, "0.2.0", True)
    with pytest.raises(dist.DistError, match=r"no heading for 0\.3\.0"):
        dist.check_changelog(text, "0.3.0", False)


def test_this_version_has_a_heading() -> None:
    import tile_kernels

    assert dist.version() == tile_kernels.__version__
    dist.check_changelog((ROOT / "CHANGELOG.md").read_text(), dist.version(), False)


def test_a_wheel_has_all_files_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "tile_kernels" / "emulator" / "include").mkdir(parents=True)
    names = ["tile_kernels/a.py", "tile_kernels/a.pyi", "tile_kernels/emulator/include/x.h"]
    for name in (*names, "tile_kernels/notes.txt"):
        (tmp_path / name).write_text("")
    wheel = tmp_path / "x.whl"

    def write(*given: str) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in (*given, "x-1.dist-info/METADATA"):
                archive.writestr(name, "")

    write(*names)
    dist.check_wheel(wheel, tmp_path)
    for wrong in (names[1:], [*names, "tests/test_x.py"]):
        write(*wrong)
        with pytest.raises(dist.DistError, match=r"missing .*unexpected"):
            dist.check_wheel(wheel, tmp_path)


def test_every_header_and_stub_is_declared_as_package_data() -> None:
    """What `tools/dist.py` expects in a wheel is what setuptools is told to put there."""
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["tile_kernels"]
    for name in dist.expected_files(ROOT):
        path = Path(name).relative_to("tile_kernels")
        assert path.suffix == ".py" or any(path.match(pattern) for pattern in patterns), name


def test_versions_of_torch_that_are_tried() -> None:
    listed = (
        "ERROR: ... (from versions: 2.9.1, 2.10.0, 2.12.0, 2.12.1, 2.13.0, 2.13.0+cpu, 2.14.0rc1)"
    )
    assert load("torch_versions").offered(listed) == ["2.10.0", "2.12.1", "2.13.0+cpu"]


def test_every_supported_torch_was_tried() -> None:
    """The bounds are those of the table that `tools/torch_versions.py` wrote."""
    results = json.loads((ROOT / "docs" / "measured" / "torch_versions.json").read_text())
    passed = [name for name, each in results.items() if each["result"] == "passed"]
    bounds = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', PYPROJECT_TEXT)
    assert bounds is not None
    minors = {int(name.split(".")[1]) for name in passed}
    assert minors == set(range(int(bounds[1]), int(bounds[2])))
    dry = subprocess.run(
        ["make", "--dry-run", "torch-versions", "TORCH_MB=2000"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "tools/torch_versions.py --max-mb 2000\n" in dry.stdout
    assert "make torch-versions TORCH_MB=2000" in (ROOT / ".ci" / "torch-versions").read_text()


# ---- commands of TileKernels --------------------------------------------------------------------


def test_stress_command(tmp_path: Path) -> None:
    """`TK_FULL_TEST=1 pytest -n N --count 2`, as TileKernels documents it, for a small test."""
    (tmp_path / "test_small.py").write_text(
        "from tile_kernels.testing.generator import generate_num_tokens\n"
        "def test_full(): assert generate_num_tokens()[0] == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--count", "2", str(tmp_path)],
        env={**os.environ, "TK_FULL_TEST": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
