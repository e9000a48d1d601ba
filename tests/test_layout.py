"""What imports what, and what a user's own files may be called."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys

import pytest

from tests.programs import ROOT, args, load, run

# Programs, agents, and what they import from the top level.
MODULES = {"monobeast", "polybeast", "polybeast_env"}
MODULES |= {"warpbeast", "warp_envs", "ppo", "pqn", "r2d2", "sac", "td3"}
MODULES |= {"atari_wrappers", "vtrace", "libtorchbeast"}
AGENTS = {"ppo", "pqn", "r2d2", "sac", "td3"}
PACKAGE = sorted((ROOT / "torchbeast").rglob("*.py"))
WINGS = "torchbeast.remote", "torchbeast.warp"  # Whoever reads an agent enters neither.


def python(code, cwd=ROOT):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_server_host_imports_neither_torch_nor_the_cpp_part():
    code = """import sys, polybeast_env
import torchbeast.remote.server, torchbeast.remote.servers
print(*sorted({name.partition(".")[0] for name in sys.modules}))"""
    modules = set(python(code).split())
    assert {"grpc", "gymnasium", "torchbeast"} <= modules
    unwanted = {"torch", "_libtorchbeast", "libtorchbeast", "vtrace", "polybeast"}
    assert not modules & (unwanted | {"tensorboard", "rich", "matplotlib", "cv2"})


def test_programs_and_agents_are_imported_without_grpc_and_without_the_cpp_part():
    python("""import sys
for name in "grpc", "grpc_health", "google.protobuf", "_libtorchbeast":
    sys.modules[name] = None  # Importing it is an ImportError.
import monobeast, polybeast, polybeast_env, warpbeast
polybeast.program_parser(), polybeast_env.parser()
for agent in "ppo", "pqn", "r2d2", "sac", "td3":
    monobeast.program_parser(agent), warpbeast.program_parser(agent)""")


@pytest.mark.parametrize("name", ["cuda", "dialing_faults", "faults"])
def test_what_make_test_does_not_run_can_be_imported(name):
    importlib.import_module(f"tests.{name}")


def test_the_top_level_of_the_distribution_is_no_more_than_what_users_edit():
    text = (ROOT / "pyproject.toml").read_text()
    modules = re.search(r"^py-modules = (\[.*?\])", text, re.M | re.S)[1]
    packages = re.search(r"^packages = (\[.*?\])", text, re.M | re.S)[1]
    assert set(ast.literal_eval(modules)) == MODULES
    assert ast.literal_eval(packages) == ["torchbeast", *WINGS]
    assert {path.stem for path in ROOT.glob("*.py")} == {*MODULES, "setup"}


def imported(path):
    """The modules that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_in_torchbeast_imports_a_program_or_an_agent():
    for path in PACKAGE:
        roots = {name.partition(".")[0] for name in imported(path)}
        assert not roots & (MODULES - {"libtorchbeast", "vtrace"}), path
        assert not roots & {"tests", "benchmarks"}, path


def test_an_agent_imports_no_program_and_nothing_of_the_network():
    for name in AGENTS:
        modules = set(imported(ROOT / f"{name}.py"))
        allowed = {*AGENTS, "atari_wrappers", "vtrace"}
        assert not {x.partition(".")[0] for x in modules} & (MODULES - allowed), name
        assert not [x for x in modules if x.startswith(WINGS)], name
    code = f"import sys, {', '.join(AGENTS)}; print(*sys.modules)"
    loaded = set(python(code).split())
    assert "torchbeast.agents" in loaded
    assert not loaded & {"polybeast", "monobeast", "polybeast_env"}
    assert not [name for name in loaded if name.startswith(WINGS)]


def test_what_all_read_imports_nothing_of_the_wings():
    for path in PACKAGE:
        if path.parent.name == "torchbeast":
            assert not [x for x in imported(path) if x.startswith(WINGS)], path


def test_no_arrow_of_imports_runs_back_up():
    def name(path):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)

    names = {name(path) for path in PACKAGE}
    graph = {name(path): names.intersection(imported(path)) for path in PACKAGE}
    assert graph["torchbeast.learner"]  # They are found.
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names one.


def test_no_file_is_longer_than_500_lines():
    """As a file of the top level; what is longer is two."""
    for path in PACKAGE:
        assert len(path.read_text().splitlines()) <= 500, path


def test_files_of_a_users_own_do_not_hide_ours(tmp_path):
    """The working directory comes first where modules are looked for."""
    for path in [*PACKAGE, ROOT / "vtrace.py"]:
        if f"{path.stem}.py" not in ("vtrace.py", "__init__.py"):
            message = f"raise ImportError('{path.stem} of the user was imported')"
            (tmp_path / path.name).write_text(message)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"environment.py", "files.py", "play.py", "server.py"} <= names
    result = run(*args("polybeast", tmp_path / "logs", steps=40), module="polybeast",
                 cwd=tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert load(tmp_path / "logs")["step"] == 40
