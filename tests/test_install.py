"""Choices and words of setup.py on machines unlike this one, and the report's verdict on GPUs."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradscale_ext import __main__ as environment

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def setup():
    specification = importlib.util.spec_from_file_location("gradscale_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where dataclasses look for annotations
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


# ---- how many compilers ----------------------------------------------------------------------------------------------


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


# ---- what is handed to setuptools ------------------------------------------------------------------------------------


def test_importing_setup_builds_nothing(setup):
    assert callable(setup.main)


def test_what_is_built(setup, tmp_path, monkeypatch):
    """The version of PyTorch is written down, and kernels are compiled into the package where they are asked for."""

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
    build = setup.build_command(SimpleNamespace(__version__="2.11.0"), SimpleNamespace(BuildExtension=BuildExtension))()
    monkeypatch.delenv("GRADSCALE_ARCHITECTURES", raising=False)
    build.run()
    assert runpy.run_path(build.get_outputs()[1])["TORCH_VERSION"] == "2.11.0"
    assert commands == []
    monkeypatch.setenv("GRADSCALE_ARCHITECTURES", "80 90")
    build.run()
    ((command, cwd, env),) = commands
    assert cwd == tmp_path / "lib"
    folder = tmp_path / "lib" / "gradscale_ext" / "kernels"
    assert command[1:] == ["-m", "gradscale_ext", "compile", "--into", folder, "--arch", "80", "90"]
    assert env["PYTHONPATH"].startswith(str(tmp_path / "lib"))


# ---- the report's verdict on GPUs ------------------------------------------------------------------------------------


def test_verdict_on_the_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert environment._driver_problem(None) is None
    assert environment._driver_problem("13.2") is None
    found = environment._driver_problem("12.4")
    assert found.startswith("supports CUDA 12.4 at most, but PyTorch")
    assert "is built for CUDA 13.0; update the driver, or install a PyTorch built for CUDA 12" in found
    monkeypatch.setattr(torch.version, "cuda", None)
    assert environment._driver_problem("12.4") is None


def test_report_on_gpus(monkeypatch, capsys):
    monkeypatch.setattr(environment, "_driver_version", lambda: "13.0")
    monkeypatch.setattr(environment, "DEVICE_TYPES", ("cpu", "cuda"))
    monkeypatch.setattr(environment._kernels, "compiler", lambda: SimpleNamespace(version="NVRTC 13.0"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU model {index}")
    checked = []
    monkeypatch.setattr(environment, "_self_check", lambda device: checked.append(device))
    assert environment.report() == 0
    text = capsys.readouterr().out
    assert "CUDA kernels   compiled by NVRTC 13.0 when they are first needed, and kept in " in text
    assert "GPU 0          GPU model 0, compute capability 8.0: kernels\n" in text
    assert checked == ["cpu", "cuda:0"]
    monkeypatch.setattr(environment, "_driver_version", lambda: "12.2")
    assert environment.report() == 1
    assert "NVIDIA driver  supports CUDA 12.2 at most" in capsys.readouterr().out


def test_report_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(environment._kernels, "compiler", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert environment.report() == 0
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

    monkeypatch.setattr(environment.ctypes, "CDLL", driver)
    assert environment._driver_version() == "12.4"
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=lambda pointer: 3))
    assert environment._driver_version() is None

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(environment.ctypes, "CDLL", missing)
    assert environment._driver_version() is None
