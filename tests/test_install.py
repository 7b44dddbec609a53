"""Choices and words of setup.py on machines unlike this one, the report's verdict on GPUs, the check of kernels."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_check import FLAGS, Function, parse, readable, report, shorten

from gradscale_ext import __main__ as environment

ROOT = Path(__file__).parent.parent
CODES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]  # of an nvcc
OWN = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"  # of a PyTorch


@pytest.fixture(scope="module")
def setup():
    specification = importlib.util.spec_from_file_location("gradscale_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where dataclasses look for annotations
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


@pytest.fixture
def machine(setup, monkeypatch, tmp_path):
    """A machine without CUDA: nothing set, nothing on PATH, nothing in the usual folders or from pip."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "GRADSCALE_NO_CUDA", "GRADSCALE_FORCE_CUDA"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(setup, "NVCC_FOLDERS", ())
    monkeypatch.setattr(setup.sys, "path", [str(tmp_path / "site-packages")])
    return tmp_path


def fake_torch(cuda="13.0", gpus=(), own=OWN):
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_capability=lambda index: gpus[index],
            get_arch_list=lambda: own.split() if gpus else [],
        ),
        _C=SimpleNamespace(_cuda_getArchFlags=lambda: own),
    )


def fake_nvcc(home, release="13.0", codes=CODES, headers=True):
    """A toolkit in the folder `home` whose nvcc answers the questions that setup.py asks."""
    (home / "bin").mkdir(parents=True)
    if headers:
        (home / "include").mkdir()
        (home / "include" / "cuda_runtime_api.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if '--version' in sys.argv: print('Cuda compilation tools, release {release}, V{release}.88')\n"
        f"if '--list-gpu-code' in sys.argv: print({chr(10).join(codes)!r})\n"
        f"if '--dryrun' in sys.argv: print('#$ _HERE_={nvcc.parent}', file=sys.stderr)\n"
    )
    nvcc.chmod(0o755)
    return nvcc


# ---- which nvcc ------------------------------------------------------------------------------------------------------


def test_nvcc_on_path_may_be_a_link(setup, machine):
    nvcc = fake_nvcc(machine / "opt" / "cuda-13.0")
    (machine / "bin" / "nvcc").symlink_to(nvcc)
    assert setup.find_toolkit(fake_torch()) == setup.Toolkit(nvcc, "13.0")


def test_cuda_home_decides_alone(setup, machine, monkeypatch):
    fake_nvcc(machine / "13", "13.0")
    (machine / "bin" / "nvcc").symlink_to(machine / "13" / "bin" / "nvcc")
    nvcc = fake_nvcc(machine / "12", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(machine / "12"))
    assert setup.find_toolkit(fake_torch("12.6")).nvcc == nvcc
    with pytest.raises(setup.NoCudaError, match=r"built for CUDA 13\.0, but .*/12/bin/nvcc is CUDA 12\.8; install"):
        setup.find_toolkit(fake_torch("13.0"))
    monkeypatch.setenv("CUDA_HOME", str(machine / "none"))
    with pytest.raises(setup.NoCudaError, match=r"CUDA_HOME=.*/none has no bin/nvcc"):
        setup.find_toolkit(fake_torch())


@pytest.mark.parametrize("package", ["cu13", "cuda_nvcc"])
def test_nvcc_from_pip(setup, machine, package):
    nvcc = fake_nvcc(machine / "site-packages" / "nvidia" / package)
    assert setup.find_toolkit(fake_torch()) == setup.Toolkit(nvcc, "13.0")


def test_nvcc_of_the_right_version_is_preferred(setup, machine):
    fake_nvcc(machine / "12", "12.4")
    (machine / "bin" / "nvcc").symlink_to(machine / "12" / "bin" / "nvcc")
    nvcc = fake_nvcc(machine / "site-packages" / "nvidia" / "cu13", "13.2")
    assert setup.find_toolkit(fake_torch("13.0")) == setup.Toolkit(nvcc, "13.2")


def test_headers_from_pip_serve_an_nvcc_without(setup, machine):
    nvcc = fake_nvcc(machine / "cuda", headers=False)
    (machine / "bin" / "nvcc").symlink_to(nvcc)
    if Path("/usr/include/cuda_runtime_api.h").exists():
        pytest.skip("CUDA's headers are the system's here")
    with pytest.raises(setup.NoCudaError, match=r"has no cuda_runtime_api\.h .* nvidia-cuda-runtime from pip"):
        setup.find_toolkit(fake_torch())
    include = machine / "site-packages" / "nvidia" / "cu13" / "include"
    include.mkdir(parents=True)
    (include / "cuda_runtime_api.h").touch()
    assert setup.find_toolkit(fake_torch()).include == include


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        (None, r"PyTorch 2\.11\.0 is not built for CUDA; install one that is"),
        (
            "13.0",
            r"built for CUDA 13\.0, but no nvcc was found; .* pip install 'nvidia-cuda-nvcc==13\.0\.\*'.*CUDA_HOME",
        ),
        (
            "12.6",
            r"built for CUDA 12\.6, but no nvcc was found; install the CUDA toolkit 12\.x \(12\.6 is best\), or name",
        ),
    ],
)
def test_no_nvcc(setup, machine, capsys, monkeypatch, cuda, message):
    toolkit, reason = setup.find_cuda(fake_torch(cuda))
    assert toolkit is None
    assert f"building for the CPU only: {reason}." in capsys.readouterr().err
    monkeypatch.setenv("GRADSCALE_FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match=f"GRADSCALE_FORCE_CUDA=1 cannot be met: .*{message}"):
        setup.find_cuda(fake_torch(cuda))


def test_another_cuda(setup, machine):
    (machine / "bin" / "nvcc").symlink_to(fake_nvcc(machine / "12", "12.4"))
    toolkit, reason = setup.find_cuda(fake_torch("13.0"))
    assert toolkit is None
    assert "PyTorch 2.11.0 is built for CUDA 13.0, but" in reason
    assert "is CUDA 12.4; install the CUDA toolkit 13.x" in reason
    assert reason.endswith("or install a PyTorch built for that CUDA")


def test_nvcc_that_does_not_work(setup, machine):
    nvcc = machine / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho cicc is missing >&2\nexit 3\n")
    nvcc.chmod(0o755)
    with pytest.raises(
        setup.NoCudaError, match=r"(?s)built for CUDA 13\.0, but `.*nvcc.*` fails \(cicc is missing\); inst"
    ):
        setup.find_toolkit(fake_torch())
    nvcc.write_bytes(b"\x7fELF of another processor")
    with pytest.raises(setup.NoCudaError, match=r"does not start \("):
        setup.find_toolkit(fake_torch())


def test_switches(setup, machine, monkeypatch):
    (machine / "bin" / "nvcc").symlink_to(fake_nvcc(machine / "13"))
    monkeypatch.setenv("GRADSCALE_NO_CUDA", "1")
    assert setup.find_cuda(fake_torch()) == (None, "GRADSCALE_NO_CUDA=1 was set")
    monkeypatch.setenv("GRADSCALE_FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match="contradict"):
        setup.find_cuda(fake_torch())
    monkeypatch.setenv("GRADSCALE_NO_CUDA", "0")
    assert setup.find_cuda(fake_torch())[0].release == "13.0"
    monkeypatch.setenv("GRADSCALE_NO_CUDA", "yes")
    with pytest.raises(SystemExit, match="GRADSCALE_NO_CUDA is 'yes'; expected 1 or 0"):
        setup.find_cuda(fake_torch())


# ---- which GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        ([], "7.5;8.0;8.6;9.0;10.0;12.0+PTX"),
        ([(9, 0), (9, 0)], "9.0+PTX"),
        ([(12, 0), (8, 9)], "8.9;12.0+PTX"),
        ([(12, 1)], "12.0+PTX"),  # not known to this nvcc: the newest code that it can run
        ([(7, 0), (8, 0)], "8.0+PTX"),  # no longer known to this nvcc
    ],
)
def test_architectures(setup, machine, monkeypatch, gpus, chosen):
    (machine / "bin" / "nvcc").symlink_to(fake_nvcc(machine / "13"))
    for variable in (None, "", "native"):
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        if variable is not None:
            monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
        toolkit, reason = setup.find_cuda(fake_torch(gpus=gpus))
        assert (toolkit.release, reason) == ("13.0", "")
        assert setup.os.environ["TORCH_CUDA_ARCH_LIST"] == chosen
        assert setup.os.environ["CUDA_HOME"] == str(machine / "13")


def test_architectures_that_are_asked_for(setup, machine, monkeypatch):
    (machine / "bin" / "nvcc").symlink_to(fake_nvcc(machine / "13"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    assert setup.find_cuda(fake_torch(gpus=[(8, 0)]))[0] is not None
    assert setup.os.environ["TORCH_CUDA_ARCH_LIST"] == "Hopper"


def test_a_list_of_an_nvcc_older_than_torch(setup, machine):
    toolkit = setup.Toolkit(fake_nvcc(machine / "12", "12.6", codes=["sm_80", "sm_90", "sm_90a"]), "12.6")
    assert setup.choose_architectures(fake_torch("12.8"), toolkit) == "8.0;9.0+PTX"


def test_gpus_too_old(setup, machine):
    (machine / "bin" / "nvcc").symlink_to(fake_nvcc(machine / "13"))
    toolkit, reason = setup.find_cuda(fake_torch(gpus=[(7, 0)]))
    assert toolkit is None
    assert "nvcc 13.0 compiles for sm_75 sm_80" in reason
    assert "while the GPUs here are of compute capability 7.0" in reason


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


def test_runtime_library_of_pip_packages(setup, machine):
    """They have no libcudart.so, which -lcudart would look for."""
    library = machine / "site-packages" / "nvidia" / "cu13" / "lib"
    library.mkdir(parents=True)
    (library / "libcudart.so.13").touch()
    module = SimpleNamespace(libraries=["c10", "cudart"], library_dirs=[str(machine / "cuda" / "lib64")])
    setup.link_cuda_runtime(module, "13")
    assert module.libraries == ["c10", ":libcudart.so.13"]
    assert module.library_dirs[-1] == str(library)
    (library / "libcudart.so").touch()
    module = SimpleNamespace(libraries=["c10", "cudart"], library_dirs=[str(library)])
    setup.link_cuda_runtime(module, "13")
    assert module.libraries == ["c10", "cudart"]


def test_record(setup, tmp_path):
    helper = SimpleNamespace(
        _get_cuda_arch_flags=lambda: [
            "-gencode=arch=compute_120,code=compute_120",
            "-gencode=arch=compute_120,code=sm_120",
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90a,code=sm_90a",
        ]
    )
    file = tmp_path / "_build.py"
    file.write_text(setup.record(fake_torch(), setup.Toolkit(Path("nvcc"), "13.0"), "", helper))
    built = runpy.run_path(str(file))
    assert built["TORCH_VERSION"] == "2.11.0"
    assert built["CUDA_COMPILER"] == "13.0"
    assert built["CUDA_ARCHITECTURES"] == ("sm_80", "sm_90a", "sm_120", "compute_120")
    file.write_text(setup.record(fake_torch(None), None, 'no "nvcc"', helper))
    built = runpy.run_path(str(file))
    assert (built["CUDA_COMPILER"], built["CUDA_ARCHITECTURES"], built["WHY_NO_CUDA"]) == (None, (), 'no "nvcc"')


def test_sources_of_one_name_have_objects_of_their_own(setup):
    """operator.cpp and operator.cu stand side by side; setuptools would compile both to operator.o."""

    class Compiler:
        def object_filenames(self, sources, output_dir=""):
            return [str(Path(output_dir, source).with_suffix(".o")) for source in sources]

    built = []

    class BuildExtension:
        compiler = Compiler()

        def build_extensions(self):
            built.extend(self.compiler.object_filenames(["a/x.cpp", "a/x.cu"], output_dir="build"))

    setup.build_command("", SimpleNamespace(BuildExtension=BuildExtension))().build_extensions()
    assert built == ["build/a/x.o", "build/a/x.cuda.o"]


# ---- the report's verdict on GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "codes", "driver", "problem"),
    [
        ((9, 0), ("sm_80", "sm_90"), "13.0", None),
        ((8, 9), ("sm_80", "sm_90"), "13.0", None),  # code of an earlier minor version
        ((8, 0), ("sm_86", "compute_86"), "13.0", "do not run on compute capability 8.0"),
        ((10, 0), ("sm_90",), "13.0", 'compiled for sm_90 and do not run .* again with TORCH_CUDA_ARCH_LIST="10.0"'),
        ((12, 0), ("sm_90", "compute_90"), "13.0", None),
        (
            (12, 0),
            ("sm_90", "compute_90"),
            "12.9",
            r"supports CUDA 12\.9 cannot read that of nvcc 13\.0; update the driver",
        ),
        ((10, 0), ("sm_90a", "compute_90a"), "13.0", "do not run on"),
        ((9, 0), ("sm_90a",), "13.0", None),
    ],
)
def test_verdict_on_a_gpu(capability, codes, driver, problem):
    built = SimpleNamespace(CUDA_ARCHITECTURES=codes, CUDA_COMPILER="13.0")
    found = environment._gpu_problem(capability, built, driver)
    assert (found is None) == (problem is None)
    assert problem is None or re.search(problem, found), found


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
    built = SimpleNamespace(CUDA_COMPILER="13.0", CUDA_ARCHITECTURES=("sm_80",), WHY_NO_CUDA="")
    capabilities = [(8, 0), (9, 0)]
    monkeypatch.setattr(environment.importlib, "import_module", lambda name: built)
    monkeypatch.setattr(environment, "_driver_version", lambda: "13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU model {index}")
    checked = []
    monkeypatch.setattr(environment, "_self_check", lambda device: checked.append(device))
    assert environment.main() == 1
    text = capsys.readouterr().out
    assert "CUDA kernels   by nvcc 13.0 for sm_80\n" in text
    assert "GPU 0          GPU model 0, compute capability 8.0: the kernels run here\n" in text
    assert "compute capability 9.0: the kernels are compiled for sm_80 and do not run" in text
    assert checked == ["cpu", "cuda:0"]
    capabilities.pop()
    assert environment.main() == 0
    monkeypatch.setattr(environment, "_driver_version", lambda: "12.2")
    assert environment.main() == 1
    assert "NVIDIA driver  supports CUDA 12.2 at most" in capsys.readouterr().out


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


# ---- make cuda-check -------------------------------------------------------------------------------------------------

SPILLING = "_ZN9gradscale40_GLOBAL__N__3f53716e_8_spill_cu_09978fdf8spillingIfLNS_4KindE1ELi64EEEvPKT_PS3_"
PTXAS = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{SPILLING}' for 'sm_90'
ptxas info    : Function properties for {SPILLING}
    336 bytes stack frame, 384 bytes spill stores, 412 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 336 bytes cumulative stack size, 368 bytes cmem[0]
ptxas info    : Compile time = 37.364 ms
ptxas info    : Compiling entry function 'sum' for 'sm_90'
ptxas info    : Function properties for sum
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compile time = 20.445 ms
ptxas info    : Function properties for called
    40 bytes stack frame, 36 bytes spill stores, 28 bytes spill loads
loss.cu(7): warning #177-D: variable "unused" was declared but never referenced
"""


def test_parser_of_ptxas():
    (spilling, total, called), others = parse(PTXAS, "sm_90")
    assert (spilling.name, spilling.registers, spilling.shared, spilling.stack) == (SPILLING, 32, 0, 336)
    assert (spilling.spill_stores, spilling.spill_loads) == (384, 412)
    assert spilling.fails
    assert (total.name, total.registers, total.shared, total.stack) == ("sum", 22, 2048, 0)
    assert not total.fails
    assert (called.name, called.registers, called.stack) == ("called", None, 40)
    assert called.fails
    assert others == ['loss.cu(7): warning #177-D: variable "unused" was declared but never referenced']


def test_table_and_own_words(capsys):
    functions, _ = parse(PTXAS, "sm_90")
    assert report(functions) == 2
    text = capsys.readouterr().out
    lines = [re.sub(r"\s+", " ", line) for line in text.splitlines()]
    assert lines[0] == "arch registers shared stack spill stores spill loads kernel"
    assert lines[2] == "sm_90 22 2048 0 0 0 sum"
    assert "    336 bytes stack frame, 384 bytes spill stores, 412 bytes spill loads" in text
    assert report([Function("sum", "sm_80", 22)]) == 0


def test_names_of_kernels():
    assert shorten(
        "void gradscale::(anonymous namespace)::f<float, (gradscale::Kind)1>(float const*, int (*)(int))"
    ) == ("f<float, (Kind)1>")
    assert shorten("plain") == "plain"
    assert list(readable([SPILLING])) == [SPILLING]


def test_the_check_compiles_as_the_extension_does(setup):
    from torch.utils import cpp_extension

    assert {*setup.NVCC_FLAGS, *cpp_extension.COMMON_NVCC_FLAGS} <= set(FLAGS)


def test_check_without_nvcc(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "cuda_check.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "no nvcc found" in done.stdout
