"""Builds the C++ extension against the installed PyTorch, for CPUs and GPUs. Needs only a C++ compiler.

Everything else about the package is in pyproject.toml. Environment variables:

- MAX_JOBS                 number of compilers at once; by default, as many as processors and memory allow
- GRADSCALE_ARCHITECTURES  compute capabilities ("80 90") whose kernels are compiled now, into the package; by default,
                           kernels are compiled at their first use (`python -m gradscale_ext compile --help`)
- CXX                      the C++ compiler, as for other extensions of PyTorch
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
TORCH = "torch>=2.11,<2.16"  # that the sources support; a binary needs the release it was compiled against
MEMORY_PER_JOB = 2 << 30  # bytes: the most that a compiler needs for PyTorch's headers


def say(message: str) -> None:
    print(f"gradscale_ext: {message}", file=sys.stderr, flush=True)


def site_folders() -> list[str]:
    """Folders where the target environment may keep its packages.

    An isolated build sees its own site-packages only, while the extension must be compiled against the PyTorch it will
    run with. pip builds with the environment's own interpreter, and hides the user's site-packages; uv builds with
    another interpreter, but leaves an activated environment on PATH.
    """
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    prefixes = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    prefixes += [str(Path(folder).parent) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for prefix in filter(None, prefixes):  # Python 3.10 has no "venv" scheme
        folders.append(sysconfig.get_path("purelib", "posix_prefix", {"base": prefix, "platbase": prefix}))
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def release_of(version: str) -> str:
    """Return 2.13.0 for 2.13.0+cu130."""
    return version.partition("+")[0]


def import_torch():  # type: ignore[no-untyped-def]
    """Import the installed PyTorch, also from an isolated build environment, whose own packages take precedence."""
    sys.path.extend(folder for folder in site_folders() if folder not in sys.path)
    found = importlib.util.find_spec("torch")
    if found is None:
        raise SystemExit(
            "gradscale_ext: PyTorch is not installed, and this extension is compiled against it. Install it into the "
            "same environment first:\n"
            f"    python -m pip install '{TORCH}' numpy\n"
            "    python -m pip install .\n"
            "With uv, in an activated environment:\n"
            f"    uv pip install '{TORCH}' numpy\n"
            "    uv pip install .\n"
            "or, in the pyproject.toml of a project that depends on gradscale_ext, with its release of PyTorch:\n"
            "    [tool.uv.extra-build-dependencies]\n"
            '    gradscale-ext = ["torch==2.13.0"]'
        )
    try:
        import torch
    except (ImportError, OSError) as error:
        raise SystemExit(
            f"gradscale_ext: PyTorch is installed ({found.origin}), but cannot be imported here: {error}\n"
            "If `python -c 'import torch'` fails with the same error, install PyTorch again:\n"
            f"    python -m pip install --force-reinstall '{TORCH}'\n"
            "or, with uv:\n"
            f"    uv pip install --reinstall '{TORCH}'"
        ) from error
    lowest, end = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[\d.]+", TORCH))
    if not lowest <= tuple(map(int, torch.__version__.split(".")[:2])) < end:
        raise SystemExit(
            f"gradscale_ext: PyTorch must be {TORCH}, but {torch.__version__} is installed. Install another version:\n"
            f"    python -m pip install '{TORCH}'\n"
            "or, with uv:\n"
            f"    uv pip install '{TORCH}'"
        )
    return torch


def find_compiler() -> str:
    """Return the C++ compiler to use, or exit with instructions for installing one."""
    candidates = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
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


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that Linux and its control groups let this process use; None where they set no limit."""
    limits = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists() and (found := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)):
        limits.append(int(found[1]) * 1024)
    groups = root / "sys/fs/cgroup"
    membership = root / "proc/self/cgroup"
    own = re.search(r"^0::/(.*)$", membership.read_text(), re.MULTILINE) if membership.exists() else None
    folder = groups / own[1] if own else groups
    files = [path / "memory.max" for path in (folder, *folder.parents) if path.is_relative_to(groups)]
    for file in (*files, groups / "memory/memory.limit_in_bytes"):
        if file.exists() and (limit := file.read_text().strip()).isdigit():
            limits.append(int(limit))
    return min(limits, default=None)


def choose_jobs(processors: int, memory: int | None) -> int:
    """Number of compilers to run at once."""
    return max(1, processors if memory is None else min(processors, memory // MEMORY_PER_JOB))


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of_compiler(compiler: str) -> str:
    """First line that the compiler prints about its version."""
    command = [*shlex.split(compiler), "--version"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip().partition("\n")[0] or compiler


def compile_arguments() -> tuple[list[str], list[str]]:
    """Compiler and linker flags. No -std: PyTorch's build helper adds the one that its headers need."""
    flags = [
        *([] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]),  # these flags follow the ones of CFLAGS
        "-g0",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wall",
        "-Werror=switch",  # each switch over kinds of heads has a case for every kind
        "-Wno-unknown-pragmas",
    ]
    if sys.platform == "darwin":  # Apple's clang has no OpenMP runtime; its simd loops need none.
        return [*flags, "-fopenmp-simd"], []
    # at::parallel_for is a header that runs threads only when OpenMP is on; PyTorch has loaded the runtime already.
    return [*flags, "-fopenmp"], ["-fopenmp"]


def translation_units() -> list[str]:
    """The files to compile: each file of CPU kernels, and one file that includes all other sources, because PyTorch's
    headers take most of the compilation of each."""
    sources = sorted(ROOT.glob("csrc/**/*.cpp"))
    kernels = [path for path in sources if "#define GRADSCALE_KERNELS" in path.read_text(encoding="utf-8")]
    unit = ROOT / "build" / "with_torch.cpp"
    others = [path.relative_to(ROOT).as_posix() for path in sources if path not in kernels]
    text = "".join(f'#include "../{path}"\n' for path in others)
    if not unit.exists() or unit.read_text(encoding="utf-8") != text:
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text, encoding="utf-8")
    return [path.relative_to(ROOT).as_posix() for path in [unit, *kernels]]


def digest_of_sources() -> str:
    """A digest of the sources of the package, Python and C++."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("csrc/**/*"), *ROOT.glob("gradscale_ext/**/*.py")]):
        if path.is_file() and path.name != "_build.py":
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def extension(torch, cpp_extension):  # type: ignore[no-untyped-def]
    """The extension module with its sources and flags."""
    flags, link_flags = compile_arguments()
    return cpp_extension.CppExtension(
        "gradscale_ext._C",
        translation_units(),
        define_macros=[("GRADSCALE_TORCH_VERSION", f'"{torch.__version__}"')],
        extra_compile_args={"cxx": flags},
        extra_link_args=link_flags,
    )


def build_command(torch, cpp_extension, compiler):  # type: ignore[no-untyped-def]
    """PyTorch's build_ext, which also writes _build.py and compiles kernels for GRADSCALE_ARCHITECTURES."""

    class BuildExtension(cpp_extension.BuildExtension):
        def run(self) -> None:
            super().run()
            self._build_py().write_text(
                '"""Written by setup.py: what the extension next to this file was compiled from, and against."""\n\n'
                f"TORCH_VERSION = {str(torch.__version__)!r}\n"
                f"COMPILER = {compiler!r}\n"
                f"SOURCES = {digest_of_sources()!r}\n"
            )
            if architectures := os.environ.get("GRADSCALE_ARCHITECTURES", "").split():
                self._compile_kernels(architectures)

        def get_outputs(self) -> list[str]:
            return [*super().get_outputs(), str(self._build_py())]

        def _build_py(self) -> Path:
            return Path(self.get_ext_fullpath("gradscale_ext._C")).parent / "_build.py"

        def _compile_kernels(self, architectures: list[str]) -> None:
            package = self._build_py().parent.resolve()
            say(f"compiling the CUDA kernels for {' '.join(architectures)}")
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "gradscale_ext",
                    "compile",
                    "--into",
                    package / "kernels",
                    "--arch",
                    *architectures,
                ],
                check=True,
                cwd=package.parent,  # so that Python imports this package, and not the checkout's
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])},
            )

    return BuildExtension


def main() -> None:
    """Hand everything to setuptools."""
    if not {"build_ext", "bdist_wheel", "dist_info", "editable_wheel", "develop", "install"} & set(sys.argv):
        setup(install_requires=[TORCH])  # source distributions need neither PyTorch nor a compiler
        return
    # ninja may be a package of the build environment whose scripts are not on PATH.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    torch = import_torch()
    requires = [f"torch=={release_of(torch.__version__)}"]
    if "dist_info" in sys.argv:  # metadata of the binary that is about to be built
        setup(install_requires=requires)
        return
    compiler = version_of_compiler(find_compiler())
    if not os.environ.get("MAX_JOBS", "").isdigit():  # otherwise ninja starts one compiler per processor
        os.environ["MAX_JOBS"] = str(choose_jobs(processors(), available_memory()))
    from torch.utils import cpp_extension

    setup(
        install_requires=requires,
        ext_modules=[extension(torch, cpp_extension)],
        cmdclass={"build_ext": build_command(torch, cpp_extension, compiler)},
    )


if __name__ == "__main__":
    main()
