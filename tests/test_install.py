"""Decisions and messages of setup.py on other machines, the report on GPUs, and the command line."""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import uv

import gradscale_ext
from gradscale_ext import __main__ as environment
from gradscale_ext import _kernels, _native, _remedies
from gradscale_ext.cli import bench, check, report

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def setup():
    specification = importlib.util.spec_from_file_location("gradscale_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look up annotations here
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


# ---- number of compile jobs ------------------------------------------------------------------------------------------


def test_the_digest_of_the_sources(setup, monkeypatch, tmp_path):
    (tmp_path / "csrc" / "flow").mkdir(parents=True)
    (tmp_path / "gradscale_ext").mkdir()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    digests = [setup.digest_of_sources()]
    for path in ("csrc/flow/identity.h", "gradscale_ext/flow.py"):
        for text in ("a", "b"):
            (tmp_path / path).write_text(text)
            digests.append(setup.digest_of_sources())
    (tmp_path / "gradscale_ext" / "_build.py").write_text("SOURCES = ''")
    assert len(set(digests)) == 5
    assert setup.digest_of_sources() == digests[-1]


def test_jobs(setup):
    assert setup.choose_jobs(16, 128 << 30) == 16
    assert setup.choose_jobs(16, 9 << 30) == 4
    assert setup.choose_jobs(16, 1 << 30) == 1
    assert setup.choose_jobs(16, None) == 16
    assert setup.processors() >= 1


def test_available_memory(setup, tmp_path):
    assert setup.available_memory(tmp_path) is None
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:    1000 kB\n")
    assert setup.available_memory(tmp_path) == 1_024_000
    group = tmp_path / "sys" / "fs" / "cgroup" / "slurm" / "job_7"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:memory:/else\n0::/slurm/job_7\n")
    (group / "memory.max").write_text("max\n")
    assert setup.available_memory(tmp_path) == 1_024_000
    (group.parent / "memory.max").write_text("4096\n")
    assert setup.available_memory(tmp_path) == 4096


# ---- what setup.py passes to setuptools ------------------------------------------------------------------------------


def test_importing_setup_builds_nothing(setup):
    assert callable(setup.main)


def test_what_is_built(setup, tmp_path, monkeypatch):
    """The version of PyTorch is recorded, and kernels are compiled into the package if requested."""

    class BuildExtension:
        def run(self):
            pass

        def get_outputs(self):
            return ["_C.so"]

        def get_ext_fullpath(self, name):
            return str(tmp_path / "lib" / "gradscale_ext" / "_C.so")

    (tmp_path / "lib" / "gradscale_ext").mkdir(parents=True)
    commands = []
    monkeypatch.setattr(setup.subprocess, "run", lambda command, check, cwd, env: commands.append((command, cwd, env)))
    torch = SimpleNamespace(__version__="2.11.0")
    build = setup.build_command(torch, SimpleNamespace(BuildExtension=BuildExtension), 'c++ "12"')()
    monkeypatch.delenv("GRADSCALE_ARCHITECTURES", raising=False)
    build.run()
    written = runpy.run_path(build.get_outputs()[1])
    assert (written["TORCH_VERSION"], written["COMPILER"]) == ("2.11.0", 'c++ "12"')
    assert written["SOURCES"] == setup.digest_of_sources()
    assert commands == []
    monkeypatch.setenv("GRADSCALE_ARCHITECTURES", "80 90")
    build.run()
    ((command, cwd, env),) = commands
    assert cwd == tmp_path / "lib"
    folder = tmp_path / "lib" / "gradscale_ext" / "kernels"
    assert command[1:] == ["-m", "gradscale_ext", "compile", "--into", folder, "--arch", "80", "90"]
    assert env["PYTHONPATH"].startswith(str(tmp_path / "lib"))


# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, built from a copy of the checkout and unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("csrc", "gradscale_ext", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "gradscale_ext" / "_build.py").write_text("TORCH_VERSION = 'that of another machine'\n")
    run_setup(copy, "sdist", "--dist-dir", str(folder))
    shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)
    return next(folder.glob("gradscale_ext-*/"))


def run_setup(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stderr


def files_below(folder, pattern="*"):
    return {path.relative_to(folder).as_posix() for path in folder.rglob(pattern) if path.is_file()}


def test_source_distribution_contains_what_building_needs(unpacked):
    assert files_below(unpacked / "csrc") == files_below(ROOT / "csrc")
    modules = files_below(ROOT / "gradscale_ext", "*.py") - {"_build.py"}
    assert files_below(unpacked / "gradscale_ext", "*.py") == modules
    assert not files_below(unpacked, "*.so") | files_below(unpacked, "test_*.py")
    metadata = email.message_from_string((unpacked / "PKG-INFO").read_text())
    assert metadata["Version"] == gradscale_ext.__version__
    assert "torch<2.16,>=2.11" in metadata.get_all("Requires-Dist")


def test_binary_contains_the_kernel_sources(unpacked, tmp_path):
    """NVRTC compiles kernels from the installed headers; setuptools emits no warning."""
    run_setup(unpacked, "build_py", "--build-lib", str(tmp_path))
    headers = files_below(ROOT / "csrc", "*.h") | files_below(ROOT / "csrc", "*.cuh")
    assert files_below(tmp_path / "gradscale_ext" / "csrc") == headers
    assert {"py.typed", "_C.pyi"} <= files_below(tmp_path / "gradscale_ext")


def test_binary_is_for_one_release_of_pytorch(unpacked, tmp_path):
    run_setup(unpacked, "dist_info", "--output-dir", str(tmp_path))
    (file,) = tmp_path.glob("*/METADATA")
    required = email.message_from_string(file.read_text()).get_all("Requires-Dist")
    assert [name for name in required if re.match(r"torch\b", name)] == [f"torch=={torch.__version__.split('+')[0]}"]


# ---- how setup.py finds PyTorch --------------------------------------------------------------------------------------


@pytest.fixture
def interpreter(tmp_path):
    """Python of an environment without PyTorch, as a build tool creates it, with a stub of setuptools."""
    venv.create(tmp_path / "isolated", symlinks=True, with_pip=False)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setuptools.py").write_text("def setup(**arguments): print(arguments['install_requires'])")
    return tmp_path / "isolated" / "bin" / "python"


def build_with(python, path="/usr/bin", **environment):
    """Request the metadata of a wheel from setup.py."""
    tools = python.parent.parent.parent / "tools"
    environment = {"PATH": path, "PYTHONPATH": str(tools), "PYTHONNOUSERSITE": "1", **environment}
    return subprocess.run([python, ROOT / "setup.py", "dist_info"], capture_output=True, text=True, env=environment)


def pretend_pytorch(site_packages, text="__version__ = '2.12.1+cu130'"):
    (site_packages / "torch").mkdir(parents=True)
    (site_packages / "torch" / "__init__.py").write_text(text)


def site_packages_of(prefix):
    return prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def test_pytorch_of_an_activated_environment(interpreter, tmp_path):
    """In a build by uv, only PATH shows which environment is activated."""
    pretend_pytorch(site_packages_of(tmp_path / "activated"))
    done = build_with(interpreter, f"{interpreter.parent}:{tmp_path}/activated/bin:/usr/bin")
    assert done.stdout == "['torch==2.12.1']\n", done.stderr


def test_folders_of_python_3_10(setup, tmp_path, monkeypatch):
    get_path = sysconfig.get_path

    def without_scheme_for_environments(name, scheme="posix_prefix", *arguments):
        assert scheme != "venv"
        return get_path(name, scheme, *arguments)

    monkeypatch.setattr(sysconfig, "get_path", without_scheme_for_environments)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    folder = site_packages_of(tmp_path)
    folder.mkdir(parents=True)
    assert str(folder) in setup.site_folders()


def test_pytorch_of_the_user(interpreter, tmp_path):
    """PyTorch was installed with `pip install --user`, where an isolated build of pip does not look."""
    pretend_pytorch(site_packages_of(tmp_path / "user"))
    python = Path(sys._base_executable)
    tools = tmp_path / "tools"
    done = subprocess.run(
        [python, "-S", ROOT / "setup.py", "dist_info"],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(tools), "PYTHONNOUSERSITE": "1", "PYTHONUSERBASE": str(tmp_path / "user")},
    )
    if "site-packages/torch/" in done.stderr:
        pytest.skip("this machine's Python has a PyTorch of its own")
    assert done.stdout == "['torch==2.12.1']\n", done.stderr


def test_no_pytorch(interpreter):
    done = build_with(interpreter)
    assert done.returncode == 1
    assert done.stderr.startswith("gradscale_ext: PyTorch is not installed, and this extension is compiled against it.")


def test_pytorch_that_cannot_be_imported(interpreter, tmp_path):
    pretend_pytorch(site_packages_of(tmp_path / "isolated"), "raise OSError('libcudart.so.13: cannot open')")
    done = build_with(interpreter)
    assert done.returncode == 1
    assert "site-packages/torch/__init__.py), but cannot be imported here: libcudart.so.13: cannot open" in done.stderr
    assert "not installed" not in done.stderr


@pytest.mark.parametrize("version", ["2.10.2", "2.16.0"])
def test_unsupported_pytorch(interpreter, tmp_path, version):
    pretend_pytorch(site_packages_of(tmp_path / "isolated"), f"__version__ = '{version}'")
    done = build_with(interpreter)
    assert done.returncode == 1
    assert f"PyTorch must be torch>=2.11,<2.16, but {version} is installed" in done.stderr


# ---- remedies --------------------------------------------------------------------------------------------------------


def commands_in(message):
    """Commands on indented lines, and between backticks."""
    found = re.findall(r"^    (\S.*)$|`([^`]+)`", message, re.MULTILINE)
    return [line or quoted for line, quoted in found if " install " in (line or quoted)]


#: A stub of torch.utils.cpp_extension, which compiles nothing.
CPP_EXTENSION = """
from pathlib import Path
from setuptools import Extension
from setuptools.command.build_ext import build_ext

def CppExtension(name, sources, **options):
    return Extension(name, sources)

class BuildExtension(build_ext):
    def build_extension(self, extension):
        path = Path(self.get_ext_fullpath(extension.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Wheels in place of an index: the build requirements as installed here, and stubs of PyTorch and NumPy."""
    folder = tmp_path_factory.mktemp("index")
    for name in ("setuptools", "wheel", "packaging", "ninja"):  # wheel depends on packaging
        found = importlib.metadata.distribution(name)
        with zipfile.ZipFile(folder / f"{name}-{found.version}-py3-none-any.whl", "w") as wheel:
            for file in found.files:
                if not {"..", "__pycache__"} & set(file.parts):
                    wheel.write(file.locate(), file)
    for name, version in (("torch", "2.10.0"), ("torch", "2.11.0"), ("torch", "2.13.0"), ("numpy", "2.0.0")):
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            information = f"{name}-{version}.dist-info"
            wheel.writestr(f"{name}/__init__.py", f"__version__ = '{version}'")
            if name == "torch":
                wheel.writestr("torch/utils/__init__.py", "")
                wheel.writestr("torch/utils/cpp_extension.py", CPP_EXTENSION)
            wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{information}/RECORD", "")
    return folder


@pytest.fixture
def shell(tmp_path, unpacked, index):
    """Runs a command as a user does, in the unpacked sources, with an empty environment activated."""
    venv.create(tmp_path / "fresh", symlinks=True)
    (tmp_path / "fresh" / "bin" / "uv").symlink_to(uv.find_uv_bin())
    sources = shutil.copytree(unpacked, tmp_path / "sources")
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/fresh/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": f"{tmp_path}/fresh",
        **dict.fromkeys(("PIP_NO_INDEX", "PIP_NO_COMPILE", "UV_NO_INDEX", "UV_OFFLINE"), "1"),
        **dict.fromkeys(("PIP_FIND_LINKS", "UV_FIND_LINKS"), str(index)),
    }

    def run(command, folder=sources):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def installed(site_packages):
    """The installed version of PyTorch, and the version that gradscale_ext requires."""
    found = {found.name: found for found in importlib.metadata.distributions(path=[str(site_packages)])}
    asked = next(name for name in found["gradscale-ext"].requires if re.match(r"torch\b", name))
    return found["torch"].version, asked


def import_remedies(monkeypatch):
    """Commands in the import errors of an extension that is not compiled, and of one compiled for another PyTorch."""
    monkeypatch.setattr(_native, "_built", lambda name: "2.11.0")
    another = commands_in(str(_native._explain(ImportError("undefined symbol"))))
    monkeypatch.setattr(_native.importlib.util, "find_spec", lambda name: None)
    missing = commands_in(str(_native._explain(ImportError("no module"))))
    monkeypatch.undo()
    return missing, another


@pytest.mark.parametrize("installer", [pytest.param("python -m pip install", marks=pytest.mark.slow), "uv pip install"])
def test_remedies(installer, interpreter, shell, tmp_path, monkeypatch):
    """Runs the commands of each message in an environment with the fault that the message reports."""
    site_packages = site_packages_of(tmp_path / "fresh")
    messages = [commands_in(build_with(interpreter).stderr)]
    isolated = site_packages_of(tmp_path / "isolated")
    pretend_pytorch(isolated, "__version__ = '2.10.0'")
    messages.append(commands_in(build_with(interpreter).stderr))
    (isolated / "torch" / "__init__.py").write_text("raise ImportError")
    messages.append(commands_in(build_with(interpreter).stderr))
    installer_lines = ([line for line in message if line.startswith(installer)] for message in messages)
    (pytorch, this), (another_pytorch,), (pytorch_again,) = installer_lines
    monkeypatch.setattr(_native, "INSTALL", installer)
    monkeypatch.setattr(_native, "REBUILD", _native.REBUILD.replace(_remedies.INSTALL, installer))
    (in_place,), (former_pytorch, this_again) = import_remedies(monkeypatch)

    if installer.startswith("python"):
        shell("python -m ensurepip")
    shell(pytorch)
    shell(this)
    assert installed(site_packages) == ("2.13.0", "torch==2.13.0")
    shell(f"{installer} torch==2.10.0")
    shell(another_pytorch)
    assert installed(site_packages)[0] == "2.13.0"
    (site_packages / "torch" / "__init__.py").unlink()  # the file may be a hard link into uv's cache
    (site_packages / "torch" / "__init__.py").write_text("raise ImportError")
    shell(pytorch_again)
    assert shell("python -c 'import torch; print(torch.__version__)'") == "2.13.0\n"
    shell(former_pytorch)
    shell(this_again)
    assert installed(site_packages) == ("2.11.0", "torch==2.11.0")
    shell(in_place)
    assert list((tmp_path / "sources" / "gradscale_ext").glob("_C*"))


def test_remedy_for_a_project_of_uv(interpreter, shell, tmp_path):
    message = build_with(interpreter).stderr
    table = textwrap.dedent(message[message.index("    [tool.uv") :])
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "project"\nversion = "1"\nrequires-python = ">=3.10"\n'
        'dependencies = ["gradscale-ext", "torch==2.13.0"]\n'
        f'[tool.uv.sources]\ngradscale-ext = {{ path = "{tmp_path}/sources" }}\n{table}'
    )
    shell(f"uv sync --python {tmp_path}/fresh/bin/python", project)
    assert installed(site_packages_of(project / ".venv")) == ("2.13.0", "torch==2.13.0")


@pytest.mark.slow
def test_remedies_name_packages_of_the_index(setup):
    """pip only looks the packages up in this machine's index, because PyTorch and NVRTC take minutes to install."""
    nvrtc = commands_in(_kernels.HOW_TO_GET_A_COMPILER.format(major=13))
    assert len(nvrtc) == 1
    for command in ("python -m pip install " + shlex.quote(setup.TORCH), *nvrtc):
        words = shlex.split(command)
        dry_run = [sys.executable, *words[1:], "--dry-run", "--no-deps", "--ignore-installed"]
        done = subprocess.run(dry_run, capture_output=True, text=True, check=False)
        assert done.stdout.count("Would install"), done.stderr


def test_compiler_that_is_missing(setup, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler found \(looked for /nowhere/g\+\+ -m64\)"):
        setup.find_compiler()


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt-get")
def test_remedy_for_a_missing_compiler(setup, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(SystemExit) as info:
        setup.find_compiler()
    command = re.search(r"sudo (apt-get .*?) *#", str(info.value))[1]
    subprocess.run([*shlex.split(command), "--simulate"], check=True, capture_output=True)


# ---- the report on GPUs ----------------------------------------------------------------------------------------------


def test_verdict_on_the_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert report.driver_problem(None) is None
    assert report.driver_problem("13.2") is None
    found = report.driver_problem("12.4")
    assert found.startswith("supports CUDA 12.4 at most, but PyTorch")
    assert "is built for CUDA 13.0; update the driver, or install a PyTorch built for CUDA 12" in found
    monkeypatch.setattr(torch.version, "cuda", None)
    assert report.driver_problem("12.4") is None


def test_report_on_gpus(monkeypatch, capsys):
    monkeypatch.setattr(report, "driver_version", lambda: "13.0")
    monkeypatch.setattr(environment, "DEVICE_TYPES", ("cpu", "cuda"))
    monkeypatch.setattr(report._kernels, "compiler", lambda: SimpleNamespace(version="NVRTC 13.0"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU model {index}")
    checked = []
    monkeypatch.setattr(check, "self_check", lambda device: checked.append(device))
    assert environment.print_report() == 0
    text = capsys.readouterr().out
    assert "CUDA kernels   compiled by NVRTC 13.0 when they are first needed, and kept in " in text
    assert "GPU 0          GPU model 0, compute capability 8.0: kernels\n" in text
    assert checked == ["cpu", "cuda:0"]
    monkeypatch.setattr(report, "driver_version", lambda: "12.2")
    assert environment.print_report() == 1
    assert "NVIDIA driver  supports CUDA 12.2 at most" in capsys.readouterr().out


def test_report_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(report._kernels, "compiler", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert environment.print_report() == 0
    text = capsys.readouterr().out
    assert (
        'none: there is no compiler for them; install NVRTC with `python -m pip install "cuda-bindings==13.*"' in text
    )


def test_driver_version(monkeypatch):
    def driver(name):
        def ask(pointer):
            pointer._obj.value = 12040
            return 0

        return SimpleNamespace(cuDriverGetVersion=ask)

    monkeypatch.setattr(report.ctypes, "CDLL", driver)
    assert report.driver_version() == "12.4"
    monkeypatch.setattr(report.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=lambda pointer: 3))
    assert report.driver_version() is None

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(report.ctypes, "CDLL", missing)
    assert report.driver_version() is None


# ---- the command line ------------------------------------------------------------------------------------------------


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradscale_ext", *arguments])
    return environment.main(), capsys.readouterr().out


def test_report_as_json(monkeypatch, capsys):
    monkeypatch.setenv("GRADSCALE_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("CXX", "clang++")
    status, text = run_main(monkeypatch, capsys, "--json")
    found = json.loads(text)
    assert (status, found["ok"], found["torch"]) == (0, True, torch.__version__)
    assert found["lies_in"] == str(Path(gradscale_ext.__file__).parent)
    assert "CXX=clang++ GRADSCALE_CACHE_DIR=/somewhere" in found["environment"]
    assert "omp" in found["OpenMP"]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("problem", ["self-check", "driver"])
def test_report_fails(problem, as_json, monkeypatch, capsys):
    """The exit status is 1 if the self-check fails, or if the driver is too old for PyTorch."""
    if problem == "self-check":
        monkeypatch.setattr(check, "self_check", lambda device: f"the fused loss differs on {device}")
    else:
        monkeypatch.setattr(report, "driver_problem", lambda version: "too old")
    status, text = run_main(monkeypatch, capsys, *(["--json"] if as_json else []))
    assert status == 1
    assert not as_json or json.loads(text)["ok"] is False
    assert ("the fused loss differs on cpu" in text) == (problem == "self-check")


def test_bench_fails_with_its_kernel(monkeypatch, capsys):
    """Python exits with 1, and prints the error."""

    def fail(*arguments):
        raise RuntimeError("NVRTC cannot compile")

    monkeypatch.setattr(bench, "works", lambda options: {"decode": {"fused": fail}})
    with pytest.raises(RuntimeError, match="NVRTC cannot compile"):
        run_main(monkeypatch, capsys, "bench", "--device", "cpu")


def test_wrong_arguments(monkeypatch, capsys):
    for arguments in (
        *(["nothing"], ["--unknown"], ["check", "--dtype", "int8"], ["check", "more"], ["compile", "more"]),
        *(["compile", "--arch"], ["bench", "more"], ["bench", "--batch", "0"], ["bench", "--unroll", "-1"]),
        *(["bench", "--actions", "0"], ["bench", "--batch", "x"], ["bench", "--bins", "4"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            run_main(monkeypatch, capsys, *arguments)
    assert "an odd number of at least 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--batch", "0"], "argument --batch: expected an integer of at least 1, got '0'"),
        (["check", "--batch", "-1"], "argument --batch: expected an integer of at least 1, got '-1'"),
        (["check", "--device", "cpu", "none"], "argument --device: expected a device of this machine, got 'none'"),
        (["bench", "--device", "none"], "argument --device: expected a device of this machine, got 'none'"),
    ],
)
def test_errors_name_the_option(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, capsys, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["check"], ["bench"], ["compile"]])
def test_help(command, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        run_main(monkeypatch, capsys, *command, "--help")
    assert capsys.readouterr().out.startswith(" ".join(["usage: python -m gradscale_ext", *command, "[-h]"]))


def test_check_covers_every_operator_and_head(monkeypatch, capsys):
    """`check` marks the operator that is wrong, and none if all are right."""
    arguments = ("check", "--json", "--batch", "4", "--device", "cpu")
    status, text = run_main(monkeypatch, capsys, *arguments)
    rows = {row["what"]: row for row in json.loads(text)["rows"]}
    assert status == 0
    public = [getattr(gradscale_ext, name) for name in gradscale_ext.__all__]
    heads = {item.__name__ for item in public if isinstance(item, type) and getattr(item, "kind", "")}
    operators = {name for name in gradscale_ext.reference.__all__ if name.endswith(("gradient", "_norm", "_value"))}
    assert heads | operators <= rows.keys()
    assert all(row["runs"] == "kernel" and row["microseconds"] > 0 for row in rows.values())
    monkeypatch.setattr(gradscale_ext, "clip_gradient_norm", lambda x, **options: x)
    status, text = run_main(monkeypatch, capsys, *arguments)
    assert (status, [row["what"] for row in json.loads(text)["rows"] if not row["ok"]]) == (1, ["clip_gradient_norm"])
    _, text = run_main(monkeypatch, capsys, *arguments[:1], *arguments[2:])
    assert text.count("WRONG") == 1
    assert f"{len(rows) - 1} of {len(rows)} within 2e-05 of the reference" in text


def test_check_reports_a_gradient_of_nan(monkeypatch, capsys):
    """Only the gradient is NaN, not the value. Python's max() would ignore a NaN that is not its first argument."""
    reverse = gradscale_ext.reverse_gradient
    monkeypatch.setattr(gradscale_ext, "reverse_gradient", lambda x, scale: reverse(x, math.nan))
    status, text = run_main(monkeypatch, capsys, "check", "--json", "--batch", "2", "--device", "cpu")
    assert (status, [row["what"] for row in json.loads(text)["rows"] if not row["ok"]]) == (1, ["reverse_gradient"])


def test_check_reports_a_failing_kernel(monkeypatch, capsys):
    def fail(*arguments, **options):
        raise RuntimeError("NVRTC cannot compile\nline 7")

    monkeypatch.setattr(gradscale_ext, "scale_gradient", fail)
    status, text = run_main(monkeypatch, capsys, "check", "--batch", "2", "--device", "cpu", "--dtype", "bfloat16")
    assert status == 1
    assert re.search(r"^cpu +scale_gradient +kernel +NVRTC cannot compile$", text, re.MULTILINE)


def test_bench(monkeypatch, capsys):
    sizes = ("--batch", "2", "--unroll", "2", "--bins", "21", "--actions", "3", "--seconds", "0", "--no-compile")
    status, text = run_main(monkeypatch, capsys, "bench", "--json", "--device", "cpu", *sizes)
    found = json.loads(text)
    assert (status, found["bins"]) == (0, 21)
    times = found["milliseconds"]
    assert all({"fused", "eager"} == ways.keys() and min(ways.values()) > 0 for ways in times.values())
    for what, ways in times.items():
        for way, median in ways.items():
            low, high = found["quartiles"][what][way]
            assert 0 < low <= median <= high
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    _, text = run_main(monkeypatch, capsys, "bench", "--device", "cpu", *sizes)
    assert [line for line in text.splitlines() if not line.startswith("  ")] == list(times)


@pytest.mark.parametrize(("load", "is_busy"), [(0.2, False), (7.5, True)])
def test_bench_warns_on_a_busy_machine(load, is_busy, monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    sizes = ("--batch", "2", "--unroll", "0", "--bins", "3", "--actions", "3", "--seconds", "0", "--no-compile")
    monkeypatch.setattr(sys, "argv", ["gradscale_ext", "bench", "--json", "--device", "cpu", *sizes])
    assert environment.main() == 0
    assert ("load of 7.5 on 8 processors" in capsys.readouterr().err) == is_busy


def test_bench_compares_like_with_like():
    """The usual eager loss and the fused loss have the same gradients."""
    options = argparse.Namespace(
        batch=3, unroll=2, bins=21, actions=4, device="cpu", dtype="float32", no_compile=True, seconds=0
    )
    loss = bench.works(options)["loss, forward and backward"]
    for fused, eager in zip(loss["fused"](), loss["eager"](), strict=True):
        torch.testing.assert_close(fused, eager)


def test_report_without_the_extension(tmp_path, monkeypatch, capsys):
    """The report runs, and gives instructions."""
    ignored = shutil.ignore_patterns("_C.*.so", "_C.*.pyd", "_build.py", "__pycache__")
    shutil.copytree(gradscale_ext.__path__[0], tmp_path / "gradscale_ext", ignore=ignored)
    # -S disables the site module, through which an editable installation would find its compiled extension.
    command = [sys.executable, "-S", "-m", "gradscale_ext", "--json"]
    environ = {**os.environ, "PYTHONPATH": str(Path(torch.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    monkeypatch.setattr(sys, "argv", ["gradscale_ext"])
    assert report.without_extension(found["problem"]) == 1
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    for facts in (found, lines):
        assert facts["torch"] == torch.__version__
        assert facts["problem"].startswith("gradscale_ext is not compiled here")
        assert commands_in(facts["problem"]) == ["python -m pip install -e ."]
