"""libtorchbeast as it is installed: where nothing can be built, and as a wheel."""

import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version

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


@pytest.mark.slow
def test_the_wheel_works_where_there_is_no_grpc_and_no_torch(source, tmp_path):
    result = shell(
        "make", "wheel", f"PYTHONS={sys.executable}", f"VENV={sys.prefix}", cwd=source,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    [wheel] = (source / "build/wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    others = names - TOP_LEVEL
    assert names >= TOP_LEVEL and len(others) == 2
    assert any(re.fullmatch(r"_libtorchbeast\..*\.so", name) for name in others)
    assert any(name.endswith(".dist-info") for name in others)
    [wheel] = (source / "dist").glob("*.whl")
    assert "manylinux" in wheel.name

    venv = tmp_path / "venv"
    assert shell(sys.executable, "-m", "venv", venv).returncode == 0
    python = venv / "bin" / "python"
    others = [f"{name}=={version(name)}" for name in ("numpy", "pytest")]
    for args in (["--no-deps", wheel], others):
        result = shell(python, "-m", "pip", "install", "--quiet", *args)
        assert result.returncode == 0, result.stdout

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
    script = f"set -e\n{hide}\nexec '{python}' -m pytest -q -s '{tests}'"
    result = shell(*unshare, "bash", "-c", script, cwd=tests)
    assert result.returncode == 0, result.stdout
    [loaded] = [line for line in result.stdout.splitlines() if "loaded:" in line]
    libraries = loaded.split("loaded:")[1].split()
    assert libraries and all(path.startswith(str(venv)) for path in libraries)
