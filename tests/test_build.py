"""libtorchbeast as it is installed: where nothing can be built, and as a wheel."""

import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from tests.programs import ROOT

QUEUE_TESTS = ["test_nest.py", "test_batching_queue.py", "test_dynamic_batcher.py"]


def shell(*command, env=None, **kwargs):
    """Runs it; its output is in .stdout, errors included."""
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        **kwargs,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A clone, with nothing built."""
    target = tmp_path_factory.mktemp("clone") / "source"
    files = shell("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT)
    assert files.returncode == 0, files.stdout
    for file in files.stdout.splitlines():
        if (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)  # With its time: for make.
    return target


def pip(*args, **kwargs):
    return shell(
        sys.executable, "-m", "pip", *args, "--disable-pip-version-check", **kwargs
    )


# What a user finds beside his own modules.
TOP_LEVEL = {"monobeast.py", "polybeast.py", "polybeast_env.py"}
TOP_LEVEL |= {"warpbeast.py", "warp_envs.py", "ppo.py", "r2d2.py", "sac.py"}
TOP_LEVEL |= {"pqn.py", "td3.py"}
TOP_LEVEL |= {"atari_wrappers.py"}
TOP_LEVEL |= {"vtrace.py", "libtorchbeast.py", "torchbeast"}


@pytest.mark.slow
def test_without_what_the_cpp_part_needs_the_rest_is_installed(source, tmp_path):
    flags = ["-v", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    env = {"PKG_CONFIG_LIBDIR": "/nowhere"}
    result = pip("install", *flags, source, env=env)
    assert result.returncode == 0, result.stdout
    missing = "torchbeast: the C++ part is not built: missing grpc++'s headers"
    assert sum(missing in line for line in result.stdout.splitlines()) == 1
    installed = {p.name for p in tmp_path.iterdir() if p.suffix != ".dist-info"}
    assert installed - {"__pycache__"} == TOP_LEVEL

    def python(code):
        # -S: no .pth files, so this repository's own installation is not seen.
        env = {"PYTHONPATH": f"{tmp_path}:{sysconfig.get_path('purelib')}"}
        return shell(sys.executable, "-S", "-c", code, env=env, cwd=tmp_path)

    argv = ["--env", "CartPole-v1", "--savedir", str(tmp_path)]
    code = f"import monobeast, polybeast; raise SystemExit(polybeast.main({argv}))"
    result = python(code)
    assert result.returncode == 2 and "type `make setup`" in result.stdout
    assert result.stdout.count("\n") == 1
    result = python("import libtorchbeast")
    assert result.returncode == 1
    assert "ImportError: libtorchbeast's C++ part is not built" in result.stdout
    assert "type `make setup`" in result.stdout and "pip install -e ." in result.stdout


def test_without_a_compiler_the_build_says_so_and_goes_on(source):
    env = {"CXX": "no-such-compiler"}
    result = shell(sys.executable, "setup.py", "build_ext", env=env, cwd=source)
    assert result.returncode == 0, result.stdout
    assert "the C++ part is not built: missing no-such-compiler (" in result.stdout


# Prints what of gRPC is loaded, after the tests.
CONFTEST = """
import ctypes, pytest

def pytest_sessionstart(session):
    for path in {hidden!r}:
        with pytest.raises(OSError):
            ctypes.CDLL(path)

def pytest_sessionfinish(session):
    loaded = {{line.split()[-1] for line in open("/proc/self/maps")}}
    print("loaded:", *(x for x in loaded if "libgrpc" in x or "libprotobuf" in x))
"""


def test_make_does_not_replace_a_directory_that_it_has_not_made(source, tmp_path):
    (tmp_path / "pyvenv.cfg").write_text("somebody's")
    flags = f"VENV={tmp_path}", f"PYTHON={sys.executable}"
    result = shell("make", "setup", *flags, cwd=source)
    assert result.returncode == 2, result.stdout
    assert f"make: {tmp_path} is there, and was not made by make" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["pyvenv.cfg"]


OURS = "{}.{}".format(*sys.version_info)


def pythons():
    """{version: interpreter} of those that `make wheel` is for, and that are here."""
    line = re.search(r"^PYTHONS \?= (.*)", (ROOT / "Makefile").read_text(), re.M)[1]
    found = {OURS: sys.executable}
    for name in line.split():
        version = name.removeprefix("python")
        others = f"~/.pyenv/versions/{version}.*/bin/python"
        for path in [name, *glob.glob(os.path.expanduser(others))]:
            with contextlib.suppress(OSError):
                if shell(path, "-c", "").returncode == 0:
                    found.setdefault(version, path)
    return found


# PyTorch's standard build has several GB.
each_python = pytest.mark.parametrize(
    "python",
    [
        pytest.param(version, marks=pytest.mark.long)
        for version in ("3.10", "3.11", "3.12", "3.13")
    ],
)


@pytest.fixture
def wheel(python, source, made_once):
    """The wheel for a Python, of `make wheel`."""
    if python not in (found := pythons()):
        pytest.skip(f"no Python {python} here")

    def make(path):
        flags = f"PYTHONS={found[python]}", f"VENV={sys.prefix}"
        result = shell("make", "wheel", *flags, cwd=source)
        assert result.returncode == 0, result.stdout
        shutil.copytree(source / "build/wheels", path / "built")
        [wheel] = (source / "dist").glob(f"*-cp{python.replace('.', '')}-*.whl")
        shutil.copy(wheel, path)

    [wheel] = made_once(f"wheel-{python}", make).glob("*.whl")
    return wheel


@pytest.fixture
def empty(python, tmp_path):
    """The python of an empty virtual environment."""
    result = shell(pythons()[python], "-m", "venv", tmp_path / "venv")
    assert result.returncode == 0, result.stdout
    return tmp_path / "venv/bin/python"


def install(python, *args):
    words = "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args
    result = shell(python, *words)
    assert result.returncode == 0, result.stdout


@each_python
def test_the_wheel_works_where_there_is_no_grpc_and_no_torch(wheel, empty, tmp_path):
    [built] = (wheel.parent / "built").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    others = names - TOP_LEVEL
    assert names >= TOP_LEVEL and len(others) == 2
    assert any(re.fullmatch(r"_libtorchbeast\..*\.so", name) for name in others)
    assert any(name.endswith(".dist-info") for name in others)
    assert "manylinux" in wheel.name
    install(empty, "--no-deps", wheel)
    install(empty, "--constraint", ROOT / "requirements-dev.txt", "numpy", "pytest")

    # The system's own libraries become empty files, in this process' view alone.
    system = [
        path
        for name in ("grpc", "protobuf", "absl")
        for path in glob.glob(f"/usr/lib/*/lib{name}*.so*")
        if not os.path.islink(path)
    ]
    assert system
    # Where no namespace of its own can be had, what is loaded is still looked at.
    test_mount = ["mount", "--bind", "/dev/null", system[0]]
    for unshare in (["unshare", "-m"], ["unshare", "-rm"], []):
        if unshare and shell(*unshare, *test_mount).returncode == 0:
            break
    else:
        system = []
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text(CONFTEST.format(hidden=system))
    for name in QUEUE_TESTS:
        shutil.copy(ROOT / "tests" / name, tests)
    hide = "\n".join(f"mount --bind /dev/null '{path}'" for path in system)
    script = f"set -e\n{hide}\nexec '{empty}' -m pytest -q -s '{tests}'"
    result = shell(*unshare, "bash", "-c", script, cwd=tests)
    assert result.returncode == 0, result.stdout
    [loaded] = [line for line in result.stdout.splitlines() if "loaded:" in line]
    libraries = loaded.split("loaded:")[1].split()
    assert libraries and all(path.startswith(f"{tmp_path}/venv") for path in libraries)


# What a user types first, each in the same folder. The last two read what the first
# ones have left.
COMMANDS = """
-m monobeast --env CartPole-v1 --total_steps 5000 --xpid mono
-m polybeast --env CartPole-v1 --total_steps 5000 --xpid poly --num_servers 1
-m monobeast --agent ppo --env CartPole-v1 --total_steps 5000 --xpid ppo
-m torchbeast.launch --seed 1,2 -- {python} -m monobeast {small}
-m monobeast --mode test --xpid mono --num_test_episodes 2
-m torchbeast.plot {logs}/seed=1 {logs}/seed=2 --out seeds.png
"""


@each_python
@pytest.mark.long
def test_the_wheel_is_all_that_is_needed_in_an_empty_folder(wheel, empty, tmp_path):
    install(empty, "--constraint", ROOT / "requirements.txt", wheel)
    (tmp_path / "empty").mkdir()
    env = {"HOME": str(tmp_path), "PYTHONPATH": ""}
    commands = COMMANDS.format(
        python=empty, small="--env CartPole-v1 --total_steps 5000",
        logs=tmp_path / "logs/torchbeast",
    )  # fmt: skip
    for line in commands.strip().splitlines():
        result = shell(empty, *line.split(), cwd=tmp_path / "empty", env=env)
        assert result.returncode == 0, result.stdout
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["seeds.png"]
    code = "import monobeast, torchbeast; print(monobeast.__file__)"
    where = shell(empty, "-c", code, cwd=tmp_path / "empty", env=env).stdout
    assert where.startswith(f"{tmp_path}/venv/")
