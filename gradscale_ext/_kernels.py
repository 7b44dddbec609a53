"""Images of the CUDA kernels: from the package, from the cache on disk, or compiled now.

A kernel is identified by the file of `csrc` that defines it and by its C++ name, with types and widths as template
arguments. Each kernel is compiled separately, by NVRTC, which PyTorch's CUDA builds include, or by nvcc if there is no
NVRTC. Neither needs a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ._remedies import INSTALL

_HERE = Path(__file__).resolve().parent
#: The C++ sources: inside an installed package, next to the package in a checkout.
SOURCES = next((path for path in (_HERE / "csrc", _HERE.parent / "csrc") if path.is_dir()), _HERE / "csrc")
#: Options of NVRTC. nvcc gets only the first: the second is an option of NVRTC.
OPTIONS = ("--std=c++17", "-default-device")
#: Images that were compiled when the package was installed.
PACKAGED = _HERE / "kernels"
HOW_TO_GET_A_COMPILER = (
    f'install NVRTC with `{INSTALL} "cuda-bindings=={{major}}.*" "nvidia-cuda-nvrtc=={{major}}.*"`, '
    "or put nvcc of the CUDA toolkit on PATH"
)


@dataclass(frozen=True)
class Image:
    """A compiled kernel: machine code, or PTX for GPUs that the compiler does not know. Memory sizes are in bytes."""

    code: bytes
    entry: str
    registers: int
    shared: int
    spilled: int


class Compiler(Protocol):
    """A program or library that compiles CUDA C++."""

    version: str

    def targets(self) -> list[str]:
        """Names of the GPUs that it compiles for, such as sm_90."""

    def compile(self, file: str, name: str, target: str) -> tuple[bytes, str, str]:
        """Compile for a target such as sm_90 (machine code) or compute_90 (PTX): the code, its entry, and the log."""


class Nvrtc:
    """NVIDIA's compiler as a library, with options in addition to the ones that every kernel needs."""

    def __init__(self, *options: str) -> None:
        from cuda.bindings import nvrtc

        self._options = options
        self._nvrtc = nvrtc
        self.version = "NVRTC {}.{}".format(*self._call("Version"))

    def _call(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._nvrtc, f"nvrtc{function}")(*arguments)
        if int(error):
            raise RuntimeError(f"NVRTC failed in {function}: {error!r}")
        return values[0] if len(values) == 1 else values

    def _text(self, what: str, program: Any) -> bytes:
        size = self._call(f"Get{what}Size", program)
        buffer = bytes(size + 2)  # NVRTC writes into it, and Python shares all bytes objects of length 1
        self._call(f"Get{what}", program, buffer)
        return buffer[:size]

    def targets(self) -> list[str]:
        return [f"sm_{number}" for number in self._call("GetSupportedArchs")]

    def compile(self, file: str, name: str, target: str) -> tuple[bytes, str, str]:
        source = f'#include "{file}"\nusing namespace gradscale;\n'
        options = [*OPTIONS, *self._options, f"--gpu-architecture={target}", f"--include-path={SOURCES}"]
        if target.startswith("sm_"):
            options.append("--ptxas-options=--verbose")
        program = self._call("CreateProgram", source.encode(), b"kernel.cu", 0, None, None)
        try:
            self._call("AddNameExpression", program, name.encode())
            (error,) = self._nvrtc.nvrtcCompileProgram(program, len(options), [text.encode() for text in options])
            log = self._text("ProgramLog", program).decode(errors="replace").rstrip("\0\n ")
            if int(error):
                raise RuntimeError(f"{self.version} cannot compile {name} of {file} for {target}:\n{log}")
            entry = self._call("GetLoweredName", program, name.encode()).decode()
            return self._text("CUBIN" if target.startswith("sm_") else "PTX", program), entry, log
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)


def _nvcc_path() -> str | None:
    folders = [os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return next((found for folder in folders if (found := shutil.which("nvcc", path=folder))), None)


class Nvcc:
    """The compiler of the CUDA toolkit."""

    def __init__(self) -> None:
        path = _nvcc_path()
        if path is None:
            raise ImportError("there is no nvcc")
        self._path = path
        release = re.search(r"release (\d+\.\d+)", self._run("--version"))
        self.version = f"nvcc {release[1] if release else '?'}"

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([self._path, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"`nvcc {' '.join(arguments)}` fails:\n{done.stdout}")
        return done.stdout

    def targets(self) -> list[str]:
        return re.findall(r"^sm_\d+$", self._run("--list-gpu-code"), re.MULTILINE)

    def compile(self, file: str, name: str, target: str) -> tuple[bytes, str, str]:
        with tempfile.TemporaryDirectory() as folder:
            source, code = Path(folder, "kernel.cu"), Path(folder, "code")
            source.write_text(f'#include "{file}"\nnamespace gradscale {{ auto* kernel = &{name}; }}\n')
            kind = ["-cubin", "-Xptxas", "-v"] if target.startswith("sm_") else ["-ptx"]
            log = self._run(*kind, OPTIONS[0], f"-arch={target}", f"-I{SOURCES}", "-o", str(code), str(source))
            binary = code.read_bytes()
        plain = name.partition("<")[0]  # a file may have more kernels
        mangled = rf"_ZN9gradscale{len(plain)}{plain}[EI]\w*".encode()
        entry = re.search(rb"\.text\.(" + mangled + rb")\0|\.entry (" + mangled + rb")\(", binary)
        if entry is None:
            raise RuntimeError(f"{self.version} compiled {name} of {file}, but its entry was not found")
        return binary, (entry[1] or entry[2]).decode(), log


@functools.cache
def compiler() -> Compiler | None:
    """The compiler of this machine; None where there is none."""
    for kind in (Nvrtc, Nvcc):
        try:
            return kind()
        except (ImportError, OSError, RuntimeError):  # no bindings, or no library behind them
            continue
    return None


def can_be_had() -> bool:
    """Return True if a compiler or compiled kernels seem to be installed, without loading them."""
    has_bindings = (
        importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
    )
    return has_bindings or _nvcc_path() is not None or any(PACKAGED.glob("*"))


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cuh")]):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _file_of(folder: Path, file: str, name: str, target: str, version: str) -> Path:
    """Path of an image. Its name is a hash of everything that the image depends on."""
    key = "\0".join((_sources_digest(), *OPTIONS, file, name, target, version))
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.{target}"


def cache_folder() -> Path:
    """GRADSCALE_CACHE_DIR, or a folder in the user's cache."""
    if chosen := os.environ.get("GRADSCALE_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gradscale_ext"


def _content(image: Image) -> bytes:
    """The content of a file: a line of JSON with a checksum of the whole image, then the code."""
    fields = asdict(image)
    code: bytes = fields.pop("code")
    checksum = hashlib.sha256(json.dumps(fields).encode() + b"\n" + code).hexdigest()
    return json.dumps(fields | {"sha256": checksum}).encode() + b"\n" + code


def _read(path: Path) -> Image | None:
    """The image in a file; None if there is none, or, with a warning, if it is damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warnings.warn(f"gradscale_ext: the kernel {path} cannot be read ({error}); it is compiled again", stacklevel=2)
        return None
    header, _, code = content.partition(b"\n")
    try:
        fields = json.loads(header)
        del fields["sha256"]
        if _content(image := Image(code, **fields)) == content:
            return image
    except (ValueError, KeyError, TypeError):
        pass
    warnings.warn(f"gradscale_ext: the file {path} is damaged; its kernel is compiled again", stacklevel=2)
    return None


def _write(path: Path, image: Image) -> None:
    """Keep an image for other processes, which see all of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    try:
        with temporary.open("xb") as file:  # with the umask's permissions; mkstemp would allow the owner only
            file.write(_content(image))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _compiled(using: Compiler, file: str, name: str, target: str) -> Image:
    code, entry, log = using.compile(file, name, target)
    own = log[log.find(f"'{entry}'") :]  # a file may have more kernels
    numbers = {
        what: int(found[1]) if (found := re.search(pattern, own)) else 0
        for what, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("shared", r"(\d+) bytes smem"),
            ("spilled", r"(\d+) bytes spill stores"),
        )
    }
    return Image(code, entry, **numbers)


def _target_for(using: Compiler, gpu: str) -> str:
    """The GPU itself, or, if it is newer than the compiler, a PTX target such as compute_90, for the driver."""
    known = using.targets()
    if gpu in known or gpu.startswith("compute_"):
        return gpu
    number = int(gpu.removeprefix("sm_"))
    older = [other for name in known if (other := int(name.removeprefix("sm_"))) < number]
    if not older:
        raise RuntimeError(f"gradscale_ext: {using.version} compiles for {' '.join(known)}, and not for {gpu}")
    return f"compute_{max(older)}"


def _need_compiler(name: str) -> Compiler:
    using = compiler()
    if using is None:
        import torch

        major = (torch.version.cuda or "13").split(".")[0]
        raise RuntimeError(
            f"gradscale_ext: the kernel {name} must be compiled, and there is no compiler here: "
            + HOW_TO_GET_A_COMPILER.format(major=major)
        )
    return using


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def image_of(file: str, name: str, gpu: str) -> tuple[Image, str]:
    """The image of a kernel for a GPU such as sm_90, and where it comes from: package, cache or compiler.

    For a `gpu` such as compute_90, the image is PTX.

    Raises:
        RuntimeError: the kernel has to be compiled, and there is no compiler, or the compiler fails.
    """
    if image := _read(_file_of(PACKAGED, file, name, gpu, "")):
        return image, "package"
    using = _need_compiler(name)
    return _compiled_image(using, file, name, _target_for(using, gpu))


def _compiled_image(using: Compiler, file: str, name: str, target: str) -> tuple[Image, str]:
    """The image of a kernel, and where it comes from: cache or compiler."""
    path = _file_of(cache_folder(), file, name, target, using.version)
    if image := _read(path):
        return image, "cache"
    image = _compiled(using, file, name, target)
    try:
        _write(path, image)
    except OSError as error:
        _say_once(
            f"gradscale_ext: kernels are compiled again in each process, because {path.parent} cannot be written "
            f"({error}); name another folder with GRADSCALE_CACHE_DIR"
        )
    return image, using.version


def compile_into(folder: Path, file: str, name: str, gpu: str) -> tuple[Image, str]:
    """Compile a kernel and store it in a folder that is installed with a package."""
    using = _need_compiler(name)
    image = _compiled(using, file, name, gpu)
    _write(_file_of(folder, file, name, gpu, ""), image)
    return image, using.version


def _images_for(file: str, name: str, gpu: str) -> Iterator[tuple[Image, str]]:
    """The images of a kernel to try on a GPU, and where each comes from: package, machine code, PTX."""
    if image := _read(_file_of(PACKAGED, file, name, gpu, "")):
        yield image, "package"
    using = _need_compiler(name)
    target = _target_for(using, gpu)
    image, _ = _compiled_image(using, file, name, target)
    yield image, f"{using.version}, {target}"
    if target.startswith("sm_"):
        target = target.replace("sm_", "compute_")
        image, _ = _compiled_image(using, file, name, target)
        yield image, f"PTX of {using.version}, {target}"


def code_and_entry(file: str, name: str, major: int, minor: int, errors: Sequence[str] = ()) -> tuple[bytes, str]:
    """Give C++ an image of a kernel for GPUs of this compute capability, and its entry.

    `errors` are the driver's errors for the images that this function returned before. An image of the package or of a
    newer compiler may not load: then this machine's compiler makes one, and the driver compiles its PTX.

    Raises:
        RuntimeError: there is no other image; the message lists the images and their errors.
    """
    tried: list[str] = []
    try:
        for image, source in _images_for(file, name, f"sm_{major}{minor}"):
            if len(tried) == len(errors):
                return image.code, image.entry
            tried.append(f"{source}: {errors[len(tried)]}")
    except RuntimeError as error:
        if not errors:
            raise
        tried.append(str(error).removeprefix("gradscale_ext: "))
    raise RuntimeError(
        f"gradscale_ext: the driver cannot load the kernel {name} for sm_{major}{minor} ({'; '.join(tried)}); update "
        "the NVIDIA driver, or install the NVRTC of the CUDA version that it supports, which `python -m gradscale_ext` "
        "prints"
    )
