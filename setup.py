"""Builds libtorchbeast's C++ part, if what it needs is there. The rest is Python."""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
PACKAGES = ["grpc++", "protobuf"]


def missing():
    """What is not there of what the C++ part needs: [names]."""
    tools = ["pkg-config", "protoc", os.environ.get("CXX", "c++")]
    result = [tool for tool in tools if shutil.which(tool.split()[0]) is None]
    if "pkg-config" in result:
        return result + [f"{package}'s headers" for package in PACKAGES]
    for package in PACKAGES:
        if subprocess.run(["pkg-config", "--exists", package]).returncode:
            result.append(f"{package}'s headers")
    return result


def pkg_config(option):
    output = subprocess.check_output(["pkg-config", option, *PACKAGES], text=True)
    return output.split()


def say(line):
    print(f"torchbeast: the C++ part is not built: {line}", file=sys.stderr)


def extensions():
    lacking = missing()
    if lacking:
        say(
            f"missing {', '.join(lacking)} (docs/cpp.md says how to get them). "
            "MonoBeast works without it, PolyBeast does not."
        )
        return []
    try:
        from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
    except ImportError:  # Without build isolation.
        say("missing pybind11 (pip install it).")
        return []
    ParallelCompile().install()
    build = ROOT / "build" / "proto"
    build.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["protoc", "-Icsrc", f"--cpp_out={build}", "csrc/torchbeast.proto"],
        cwd=ROOT,
        check=True,
    )
    return [
        Pybind11Extension(
            "_libtorchbeast",
            sources=["csrc/bindings.cc", "build/proto/torchbeast.pb.cc"],
            depends=sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/*")),
            include_dirs=["csrc", "build/proto"],
            cxx_std=17,
            extra_compile_args=["-O2", "-g0", *pkg_config("--cflags")],
            extra_link_args=pkg_config("--libs"),
        )
    ]


# Asked for its metadata, setup.py neither builds nor says anything.
builds = any(
    arg.startswith(("build", "bdist", "editable", "install")) for arg in sys.argv
)
setup(ext_modules=extensions() if builds else [])
