"""Builds the C++ (and, where there is one, CUDA) extension against the PyTorch that is installed.

Everything else about the package is in pyproject.toml. Environment variables:

- GRADSCALE_NO_CUDA=1     build for the CPU although PyTorch and nvcc would allow CUDA
- GRADSCALE_FORCE_CUDA=1  fail instead of building for the CPU when CUDA cannot be built
- MAX_JOBS, CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST  as PyTorch's own extensions use them
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
PYTHON = shlex.quote(sys.executable)


def say(message: str) -> None:
    print(f"gradscale_ext: {message}", file=sys.stderr, flush=True)


def import_torch():  # type: ignore[no-untyped-def]
    """The installed PyTorch, found also from inside pip's isolated build environment.

    An isolated build sees its own site-packages only, while the extension must be compiled against the PyTorch it will
    run with. The folders of the environment that is installed into are appended, so that the isolated ones keep
    precedence.
    """
    try:
        import torch
    except ImportError:
        folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if prefix := os.environ.get(variable):
                folders.append(sysconfig.get_path("purelib", vars={"base": prefix, "platbase": prefix}))
        sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)
        try:
            import torch
        except ImportError:
            raise SystemExit(
                "gradscale_ext: PyTorch is not installed, and this extension is compiled against it. Install that:\n"
                "    python -m pip install 'torch>=2.11,<2.16'\n"
                "    python -m pip install --no-build-isolation .\n"
                "With uv: `uv pip install --no-build-isolation .`, or in pyproject.toml\n"
                "    [tool.uv.extra-build-dependencies]\n"
                '    gradscale-ext = [{ requirement = "torch", match-runtime = true }]'
            ) from None
    return torch


def find_compiler() -> str:
    """The C++ compiler that will be used, or an exit that says how to get one."""
    candidates = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    if sys.platform == "win32":
        return "cl"
    for candidate in candidates:
        if shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise SystemExit(
        f"gradscale_ext: no C++ compiler found (looked for {', '.join(candidates)}). Install one:\n"
        "    sudo apt-get install g++          # Debian, Ubuntu\n"
        "    sudo dnf install gcc-c++          # Fedora, RHEL\n"
        "    xcode-select --install            # macOS\n"
        "or name it with CXX=/path/to/compiler."
    )


def find_nvcc() -> Path | None:
    """The CUDA compiler: below CUDA_HOME or CUDA_PATH, on PATH, or in the usual folder. No GPU is needed."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            return Path(home, "bin", "nvcc") if shutil.which("nvcc", path=os.path.join(home, "bin")) else None
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        return None
    # What is on PATH may be a link or a script; nvcc itself says from where it works.
    dry_run = [found, "--dryrun", "-x", "cu", "-E", os.devnull]
    text = subprocess.run(dry_run, capture_output=True, text=True).stderr
    folder = next((line.split("=", 1)[1].strip() for line in text.splitlines() if "_HERE_=" in line), None)
    return Path(folder, "nvcc") if folder else Path(found).resolve()


def find_cuda(torch, sources: list[str]) -> bool:  # type: ignore[no-untyped-def]
    """Whether to compile the CUDA sources: there are some, and PyTorch and nvcc are of the same CUDA major version."""
    if os.environ.get("GRADSCALE_NO_CUDA") == "1":
        say("building for the CPU only, as GRADSCALE_NO_CUDA=1 asks.")
        return False
    reason = None
    nvcc = None
    if torch.version.cuda is None:
        reason = f"PyTorch {torch.__version__} is a CPU build"
    elif (nvcc := find_nvcc()) is None:
        reason = (
            f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, but no nvcc was found; install the "
            f"CUDA toolkit {torch.version.cuda.split('.')[0]}.x, or name its folder with CUDA_HOME"
        )
    else:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        found = text.split("release ")[-1].split(",")[0]
        if found.split(".")[0] != torch.version.cuda.split(".")[0]:
            reason = f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, but {nvcc} is CUDA {found}"
        elif not sources:
            reason = "this version has no CUDA sources yet"
    if reason is None:
        say(f"building for the CPU and for CUDA with {nvcc}.")
        os.environ["CUDA_HOME"] = str(nvcc.parent.parent)
        return True
    if os.environ.get("GRADSCALE_FORCE_CUDA") == "1":
        raise SystemExit(f"gradscale_ext: GRADSCALE_FORCE_CUDA=1, but {reason}.")
    say(f"building for the CPU only: {reason}.")
    return False


def compile_arguments() -> tuple[list[str], list[str]]:
    """Compiler and linker flags. No -std: PyTorch's build helper adds the one that its headers need."""
    if sys.platform == "win32":
        return ["/O2", "/openmp:experimental"], []
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
    if sys.platform == "darwin":  # Apple's clang has no OpenMP runtime; its simd loops need none.
        return [*flags, "-fopenmp-simd"], []
    # at::parallel_for is a header that runs threads only when OpenMP is on; PyTorch has loaded the runtime already.
    return [*flags, "-fopenmp"], ["-fopenmp"]


def find_sources(pattern: str) -> list[str]:
    """Files below csrc/, relative to the project's root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"csrc/**/{pattern}"))


def extension(torch, with_cuda: bool, cpp_extension):  # type: ignore[no-untyped-def]
    """The extension module with everything it is compiled from."""
    flags, link_flags = compile_arguments()
    macros = [
        ("GRADSCALE_TORCH_VERSION", f'"{torch.__version__}"'),
        ("GRADSCALE_CUDA_VERSION", f'"{torch.version.cuda}"' if with_cuda else '""'),
    ]
    kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "gradscale_ext._C",
        find_sources("*.cpp") + (find_sources("*.cu") if with_cuda else []),
        define_macros=macros + ([("GRADSCALE_WITH_CUDA", "1")] if with_cuda else []),
        extra_compile_args={"cxx": flags, "nvcc": ["-O3"]},
        extra_link_args=link_flags,
    )


def build_command(torch, cpp_extension):  # type: ignore[no-untyped-def]
    """PyTorch's build_ext, which also writes down what the extension was built against."""

    class BuildExtension(cpp_extension.BuildExtension):
        def run(self) -> None:
            super().run()
            target = Path(self.get_ext_fullpath("gradscale_ext._C")).parent / "_build.py"
            target.write_text(
                '"""Written by setup.py: what the extension beside this file was compiled against."""\n\n'
                f'TORCH_VERSION = "{torch.__version__}"\n'
            )

        def get_outputs(self) -> list[str]:
            written = Path(self.get_ext_fullpath("gradscale_ext._C")).parent / "_build.py"
            return [*super().get_outputs(), str(written)]

    return BuildExtension


def main() -> None:
    """Hand everything to setuptools."""
    if not {"build_ext", "bdist_wheel", "editable_wheel", "develop", "install"} & set(sys.argv):
        setup()  # metadata and source distributions need neither PyTorch nor a compiler
        return
    # ninja may be a package of the build environment whose scripts are not on PATH.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    torch = import_torch()
    find_compiler()
    with_cuda = find_cuda(torch, find_sources("*.cu"))
    from torch.utils import cpp_extension  # after CUDA_HOME is known, which it reads when it is imported

    setup(
        ext_modules=[extension(torch, with_cuda, cpp_extension)],
        cmdclass={"build_ext": build_command(torch, cpp_extension)},
    )


main()
