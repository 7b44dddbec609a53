"""Builds the C++ (and, where there is one, CUDA) extension against the PyTorch that is installed.

Everything else about the package is in pyproject.toml. Environment variables:

- GRADSCALE_NO_CUDA=1     build for the CPU although PyTorch and nvcc would allow CUDA
- GRADSCALE_FORCE_CUDA=1  fail instead of building for the CPU when CUDA cannot be built
- MAX_JOBS                compilers that run at once; if not set, as many as fit the processors and the memory
- TORCH_CUDA_ARCH_LIST    GPUs to compile for ("8.0;9.0+PTX"); if not set, those present, or else PyTorch's own
- CXX, CUDA_HOME          as PyTorch's own extensions use them
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# Folders that installers of CUDA use without adding them to PATH.
NVCC_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-{major}/bin", "/opt/cuda/bin")
NVCC_FLAGS = ["-O3", *([] if sys.platform == "win32" else ["-Xcompiler=-Werror=switch"])]
MEMORY_PER_JOB = 2 << 30  # bytes, the most that nvcc or a C++ compiler takes for PyTorch's headers


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


class NoCudaError(Exception):
    """Reason why CUDA cannot be compiled for, and the way out, as the rest of a sentence."""


@dataclass(frozen=True)
class Toolkit:
    """The CUDA compiler, its release such as "13.0", and the folder of its headers where nvcc and PyTorch miss it."""

    nvcc: Path
    release: str
    include: Path | None = None


def asks_for(variable: str) -> bool:
    """Whether an environment variable of this file is 1."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"gradscale_ext: {variable} is {value!r}; expected 1 or 0.")
    return value == "1"


def output_of(command: list[str]) -> str:
    """Text that a CUDA tool prints, on either stream."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise NoCudaError(f"`{shlex.join(command)}` does not start ({error})") from None
    if done.returncode != 0:
        raise NoCudaError(f"`{shlex.join(command)}` fails ({done.stdout.strip()})")
    return done.stdout


def how_to_get_nvcc(cuda: str) -> str:
    """Instructions to install nvcc of this CUDA version. For CUDA 12, pip has none."""
    major = cuda.split(".")[0]
    packages = [f"'nvidia-{name}=={cuda}.*'" for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-cccl")]
    from_pip = f" or `python -m pip install {' '.join(packages)}`" if int(major) >= 13 else ""
    return f"install the CUDA toolkit {major}.x ({cuda} is best){from_pip}, or name its folder with CUDA_HOME"


def places_of_nvcc(major: str) -> list[Path]:
    """The CUDA compilers, best first: of CUDA_HOME alone if set, else on PATH, in the usual folders, from pip."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            if found := shutil.which("nvcc", path=os.path.join(home, "bin")):
                return [Path(found)]
            raise NoCudaError(f"{variable}={home} has no bin/nvcc")
    from_pip = [os.path.join(path, f"nvidia/{name}/bin") for path in sys.path for name in (f"cu{major}", "cuda_nvcc")]
    usual = [folder.format(major=major) for folder in NVCC_FOLDERS]
    folders = [os.environ.get("PATH", os.defpath), *usual, *from_pip]
    found = (shutil.which("nvcc", path=folder) for folder in folders)
    return list(dict.fromkeys(nvcc_itself(nvcc) for nvcc in found if nvcc))


def nvcc_itself(found: str) -> Path:
    """The compiler behind a link or script on PATH, as nvcc itself reports it."""
    text = output_of([found, "--dryrun", "-x", "cu", "-E", os.devnull])
    folder = re.search(r"_HERE_=(.*)", text)
    return Path(folder[1].strip(), "nvcc") if folder else Path(found).resolve()


def missing_include(nvcc: Path, major: str) -> Path | None:
    """The folder to add for CUDA's headers, or None where it is one that compilers search anyway."""
    home = nvcc.parent.parent
    if any((folder / "cuda_runtime_api.h").exists() for folder in (home / "include", Path("/usr/include"))):
        return None
    packages = [Path(path, "nvidia", name) for path in sys.path for name in (f"cu{major}", "cuda_runtime")]
    for folder in (*home.glob("targets/*/include"), *(package / "include" for package in packages)):
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    raise NoCudaError(
        f"{nvcc} has no cuda_runtime_api.h in {home / 'include'}; install the headers of the CUDA runtime beside it "
        f"(cuda-cudart-dev of your distribution, or nvidia-cuda-runtime from pip)"
    )


def find_toolkit(torch) -> Toolkit:  # type: ignore[no-untyped-def]
    """The CUDA compiler whose major version is that of PyTorch. No GPU is needed."""
    cuda = torch.version.cuda
    if cuda is None:
        raise NoCudaError(
            f"PyTorch {torch.__version__} is not built for CUDA; install one that is "
            "(https://pytorch.org/get-started/locally)"
        )
    built = f"PyTorch {torch.__version__} is built for CUDA {cuda}"
    major = cuda.split(".")[0]
    try:
        places = places_of_nvcc(major)
        releases = [re.findall(r"release (\d+\.\d+)", output_of([str(nvcc), "--version"])) for nvcc in places]
    except NoCudaError as error:
        raise NoCudaError(f"{built}, but {error}; {how_to_get_nvcc(cuda)}") from None
    if not places:
        raise NoCudaError(f"{built}, but no nvcc was found; {how_to_get_nvcc(cuda)}")
    for nvcc, release in zip(places, releases, strict=True):
        if release and release[0].split(".")[0] == major:
            if tuple(map(int, release[0].split("."))) < OLDEST_NVCC:
                oldest = ".".join(map(str, OLDEST_NVCC))
                raise NoCudaError(f"{built}, and {nvcc} is CUDA {release[0]}, but the kernels need {oldest} or later")
            return Toolkit(nvcc, release[0], missing_include(nvcc, major))
    others = " and ".join(
        f"{nvcc} is CUDA {release[0] if release else 'of an unknown version'}"
        for nvcc, release in zip(places, releases, strict=True)
    )
    raise NoCudaError(f"{built}, but {others}; {how_to_get_nvcc(cuda)}, or install a PyTorch built for that CUDA")


# Kernel arguments of more than 4 KB need this compute capability, and nvcc 12.1.
OLDEST_GPU = 70
OLDEST_NVCC = (12, 1)


def choose_architectures(torch, toolkit: Toolkit) -> str:  # type: ignore[no-untyped-def]
    """TORCH_CUDA_ARCH_LIST for the GPUs that are present, or else for those that PyTorch itself is compiled for.

    PTX is added for the newest, so that later GPUs can compile it when the program runs. A GPU that this nvcc does not
    know yet gets the newest code of PyTorch's that it can run.
    """
    known = re.findall(r"^sm_(\d+)$", output_of([str(toolkit.nvcc), "--list-gpu-code"]), re.MULTILINE)
    flags = torch.cuda.get_arch_list() or torch._C._cuda_getArchFlags().split()  # the former is empty without a GPU
    own = re.findall(r"\bsm_(\d+)\b", " ".join(flags))
    supported, common = (
        {(int(name[:-1]), int(name[-1])) for name in names if int(name) >= OLDEST_GPU}
        for names in (known, set(known) & set(own))
    )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = {tuple(torch.cuda.get_device_capability(index)) for index in range(count)}
    usable = {gpu if gpu in supported else max((c for c in common if c <= gpu), default=None) for gpu in present}
    chosen = sorted(usable - {None}) if present else sorted(common)
    if not chosen:
        wanted = " and ".join(f"{major}.{minor}" for major, minor in sorted(present)) or " ".join(flags)
        whose = "the GPUs here are of compute capability" if present else f"PyTorch {torch.__version__} is compiled for"
        raise NoCudaError(
            f"nvcc {toolkit.release} compiles for {' '.join(f'sm_{name}' for name in known)}, while {whose} {wanted}; "
            "install a toolkit that compiles for them, or name other GPUs with TORCH_CUDA_ARCH_LIST"
        )
    return ";".join(f"{major}.{minor}" for major, minor in chosen) + "+PTX"


def find_cuda(torch) -> tuple[Toolkit | None, str]:  # type: ignore[no-untyped-def]
    """The toolkit, or None and the reason. Sets the environment variables that PyTorch's build helper reads."""
    no_cuda, force_cuda = asks_for("GRADSCALE_NO_CUDA"), asks_for("GRADSCALE_FORCE_CUDA")
    if no_cuda and force_cuda:
        raise SystemExit(
            "gradscale_ext: GRADSCALE_NO_CUDA=1 and GRADSCALE_FORCE_CUDA=1 contradict each other; unset one."
        )
    try:
        if no_cuda:
            raise NoCudaError("GRADSCALE_NO_CUDA=1 was set")
        toolkit = find_toolkit(torch)
        if os.environ.get("TORCH_CUDA_ARCH_LIST", "native") in ("", "native"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = choose_architectures(torch, toolkit)
    except NoCudaError as reason:
        if force_cuda:
            raise SystemExit(f"gradscale_ext: GRADSCALE_FORCE_CUDA=1 cannot be met: {reason}.") from None
        say(f"building for the CPU only: {reason}.")
        return None, str(reason)
    os.environ["CUDA_HOME"] = str(toolkit.nvcc.parent.parent)
    architectures = os.environ["TORCH_CUDA_ARCH_LIST"]
    say(f"building for the CPU and, with {toolkit.nvcc} (CUDA {toolkit.release}), for GPUs {architectures}.")
    return toolkit, ""


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


def compile_arguments() -> tuple[list[str], list[str]]:
    """Compiler and linker flags. No -std: PyTorch's build helper adds the one that its headers need."""
    if sys.platform == "win32":
        return ["/O2", "/openmp:experimental"], []
    flags = [
        "-O3",
        "-g0",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wall",
        "-Werror=switch",  # each kind of head has a case wherever kinds are told apart
        "-Wno-unknown-pragmas",
    ]
    if sys.platform == "darwin":  # Apple's clang has no OpenMP runtime; its simd loops need none.
        return [*flags, "-fopenmp-simd"], []
    # at::parallel_for is a header that runs threads only when OpenMP is on; PyTorch has loaded the runtime already.
    return [*flags, "-fopenmp"], ["-fopenmp"]


def find_sources(pattern: str) -> list[str]:
    """Files below csrc/, relative to the project's root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"csrc/**/{pattern}"))


def link_cuda_runtime(extension, major: str) -> None:  # type: ignore[no-untyped-def]
    """Name the file of the CUDA runtime where -lcudart finds none: pip brings libcudart.so.13, but no libcudart.so."""
    folders = [Path(folder) for folder in extension.library_dirs]
    if any((folder / "libcudart.so").exists() for folder in folders):
        return
    folders += [Path(path, "nvidia", name, "lib") for path in sys.path for name in (f"cu{major}", "cuda_runtime")]
    found = next((file for folder in folders for file in folder.glob(f"libcudart.so.{major}*")), None)
    if found is not None:
        extension.libraries = [f":{found.name}" if name == "cudart" else name for name in extension.libraries]
        extension.library_dirs.append(str(found.parent))


def extension(torch, toolkit: Toolkit | None, cpp_extension):  # type: ignore[no-untyped-def]
    """The extension module with its sources and flags."""
    flags, link_flags = compile_arguments()
    macros = [
        ("GRADSCALE_TORCH_VERSION", f'"{torch.__version__}"'),
        ("GRADSCALE_CUDA_VERSION", f'"{torch.version.cuda}"' if toolkit else '""'),
    ]
    kind = cpp_extension.CUDAExtension if toolkit else cpp_extension.CppExtension
    module = kind(
        "gradscale_ext._C",
        find_sources("*.cpp") + (find_sources("*.cu") if toolkit else []),
        include_dirs=[str(toolkit.include)] if toolkit and toolkit.include else [],
        define_macros=macros + ([("GRADSCALE_WITH_CUDA", "1")] if toolkit else []),
        extra_compile_args={"cxx": flags, "nvcc": NVCC_FLAGS},
        extra_link_args=link_flags,
    )
    if toolkit:
        link_cuda_runtime(module, toolkit.release.split(".")[0])
    return module


def record(torch, toolkit: Toolkit | None, reason: str, cpp_extension) -> str:  # type: ignore[no-untyped-def]
    """Text of _build.py."""
    options = cpp_extension._get_cuda_arch_flags() if toolkit else []
    codes = [option.split(",code=")[1] for option in options]
    codes.sort(key=lambda code: (code.startswith("compute_"), int(re.findall(r"\d+", code)[0])))
    return (
        '"""Written by setup.py: what the extension beside this file was compiled against."""\n\n'
        f"TORCH_VERSION = {str(torch.__version__)!r}\n"
        f"CUDA_COMPILER = {(toolkit.release if toolkit else None)!r}\n"
        f"CUDA_ARCHITECTURES = {tuple(codes)!r}\n"
        f"WHY_NO_CUDA = {reason!r}\n"
    )


def build_command(text: str, cpp_extension):  # type: ignore[no-untyped-def]
    """PyTorch's build_ext, which also writes `text` to _build.py beside the extension."""

    class BuildExtension(cpp_extension.BuildExtension):
        def run(self) -> None:
            super().run()
            self._build_py().write_text(text)

        def build_extensions(self) -> None:
            # Both operator.cpp and operator.cu, side by side, would become operator.o.
            name_objects = self.compiler.object_filenames

            def object_filenames(sources, *args, **kwargs):  # type: ignore[no-untyped-def]
                objects = map(Path, name_objects(sources, *args, **kwargs))
                suffixes = (".cuda" if os.fspath(source).endswith(".cu") else "" for source in sources)
                return [
                    str(path.with_suffix(suffix + path.suffix)) for path, suffix in zip(objects, suffixes, strict=True)
                ]

            self.compiler.object_filenames = object_filenames
            super().build_extensions()

        def get_outputs(self) -> list[str]:
            return [*super().get_outputs(), str(self._build_py())]

        def _build_py(self) -> Path:
            return Path(self.get_ext_fullpath("gradscale_ext._C")).parent / "_build.py"

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
    toolkit, reason = find_cuda(torch)
    if not os.environ.get("MAX_JOBS", "").isdigit():  # anything else makes ninja start one compiler a processor
        os.environ["MAX_JOBS"] = str(choose_jobs(processors(), available_memory()))
    from torch.utils import cpp_extension  # after CUDA_HOME is known, which it reads when it is imported

    setup(
        ext_modules=[extension(torch, toolkit, cpp_extension)],
        cmdclass={"build_ext": build_command(record(torch, toolkit, reason, cpp_extension), cpp_extension)},
    )


if __name__ == "__main__":
    main()
