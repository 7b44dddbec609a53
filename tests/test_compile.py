"""Kernels by name: compiled by NVRTC or nvcc, cached on disk, loaded and launched through a driver.

The driver is simulated by tests/ptx, which runs PTX on the CPU (`make test` builds it).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from processes import one_server, start_processes

import gradscale_ext as gs
from gradscale_ext import _kernels
from gradscale_ext._native import _C
from gradscale_ext.cli import compile as precompile

FILE, NAME = "flow/cuda/scale_gradient.cuh", "scale_dense<float>"
DRIVER = Path(sys.prefix) / "driver.so"


@pytest.fixture(autouse=True)
def compiler():
    if not isinstance(_kernels.compiler(), _kernels.Nvrtc):
        pytest.skip("there is no NVRTC")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADSCALE_CACHE_DIR", str(tmp_path / "cache"))
    _kernels._say_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def stand_in(request):
    """CPU tensors are treated as GPU tensors; returns the driver."""
    if not DRIVER.exists():
        pytest.skip("the simulated driver is not built (make test)")
    if request.config.getoption("--simulated-kernels"):
        pytest.skip("with --simulated-kernels, every test runs on the simulated driver")
    _C.set_kernel_images(_ptx)
    _C.use_driver_for_cpu(str(DRIVER))
    yield ctypes.CDLL(str(DRIVER))
    _C.use_driver_for_cpu(None)
    _C.set_kernel_images(None)


def _ptx(file, name, major, minor, errors):
    assert not errors, errors
    image, _ = _kernels.image_of(file, name, f"compute_{major}{minor}")
    return image.code, image.entry


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_an_image_is_compiled_once_and_then_read(cache):
    first, source = _kernels.image_of(FILE, NAME, "sm_90")
    assert source == _kernels.compiler().version
    assert first.code.startswith(b"\x7fELF")
    assert first.registers > 0
    assert first.spilled == 0
    assert _kernels.image_of(FILE, NAME, "sm_90") == (first, "cache")
    assert only_file(cache).name.endswith(".sm_90")


def test_the_file_name_depends_on_everything_that_affects_an_image(monkeypatch):
    path = _kernels._file_of(Path("x"), FILE, NAME, "sm_90", "NVRTC 13.0")
    for other in (
        (Path("x"), FILE + "x", NAME, "sm_90", "NVRTC 13.0"),
        (Path("x"), FILE, NAME + "x", "sm_90", "NVRTC 13.0"),
        (Path("x"), FILE, NAME, "sm_80", "NVRTC 13.0"),
        (Path("x"), FILE, NAME, "sm_90", "NVRTC 13.1"),
    ):
        assert _kernels._file_of(*other) != path
    monkeypatch.setattr(_kernels, "_sources_digest", lambda: "of other sources")
    assert _kernels._file_of(Path("x"), FILE, NAME, "sm_90", "NVRTC 13.0") != path


@pytest.mark.parametrize("folder", ["cuda", "loss/cuda"])
def test_the_file_name_depends_on_the_sources_in_every_folder(folder, tmp_path, monkeypatch):
    shutil.copytree(_kernels.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(_kernels, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(_kernels, "_sources_digest", _kernels._sources_digest.__wrapped__)
    before = _kernels._file_of(Path("x"), FILE, NAME, "sm_90", "NVRTC 13.0")
    for source in [path for path in (tmp_path / "csrc" / folder).iterdir() if path.suffix in (".h", ".cuh")]:
        text = source.read_bytes()
        source.write_bytes(text + b"\n")
        assert _kernels._file_of(Path("x"), FILE, NAME, "sm_90", "NVRTC 13.0") != before
        source.write_bytes(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:200],
        lambda data: b"{}\n" + data,
        lambda data: b"[]\n",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"entry"', b'"entrails"'),
        lambda data: data.replace(b"_ZN9gradscale", b"_ZN9gradscalf"),
        lambda data: data.replace(b'"spilled": 0', b'"spilled": 1'),
        lambda data: data.replace(b": ", b":  ", 1),
    ],
    ids=[
        "empty",
        "cut",
        "cut in the header",
        "other header",
        "not an object",
        "not UTF-8",
        "other field",
        "other entry",
        "other number",
        "other space",
    ],
)
def test_a_damaged_file_is_compiled_again_with_a_warning(cache, damage):
    first, _ = _kernels.image_of(FILE, NAME, "sm_90")
    path = only_file(cache)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"gradscale_ext: the file \S+ is damaged; its kernel is compiled again"):
        again, source = _kernels.image_of(FILE, NAME, "sm_90")
    assert (again.entry, source) == (first.entry, _kernels.compiler().version)
    assert _kernels.image_of(FILE, NAME, "sm_90") == (again, "cache")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], ids=oct)
def test_file_permissions_follow_the_umask(cache, tmp_path, umask):
    before = os.umask(umask)
    try:
        _kernels.image_of(FILE, NAME, "sm_90")
        _kernels.compile_into(tmp_path / "kernels", FILE, NAME, "sm_90")
    finally:
        os.umask(before)
    for folder in (cache, tmp_path / "kernels"):
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
        assert only_file(folder).stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("variable", ["GRADSCALE_CACHE_DIR", "XDG_CACHE_HOME", None])
def test_a_tilde_means_the_home_folder(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("GRADSCALE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for home in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(home, str(tmp_path / "home"))
    if variable is not None:
        monkeypatch.setenv(variable, "~/kernels")
    expected = {"GRADSCALE_CACHE_DIR": "kernels", "XDG_CACHE_HOME": "kernels/gradscale_ext"}
    assert _kernels.cache_folder() == tmp_path / "home" / expected.get(variable, ".cache/gradscale_ext")


def test_an_unwritable_folder_causes_one_warning(cache):
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"compiled again in each process.*GRADSCALE_CACHE_DIR"):
        image, _ = _kernels.image_of(FILE, NAME, "sm_90")
    assert image.code
    assert _kernels.image_of(FILE, NAME, "sm_90")[0].entry == image.entry  # and no second warning


def test_an_unreadable_file_causes_a_warning(cache):
    _kernels.image_of(FILE, NAME, "sm_90")
    path = only_file(cache)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="cannot be"):  # can be neither read nor written
        assert _kernels.image_of(FILE, NAME, "sm_90")[0].code


def test_an_interrupted_write_leaves_no_file(cache, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        _kernels.image_of(FILE, NAME, "sm_90")
    assert list(cache.iterdir()) == []


def test_a_gpu_newer_than_the_compiler_gets_ptx():
    image, _ = _kernels.image_of(FILE, NAME, "sm_999")
    assert f".entry {image.entry}(".encode() in image.code


@pytest.mark.parametrize("target", ["sm_90", "sm_999"])
def test_compiling_does_not_modify_shared_bytes(target):
    """Python shares one object per single byte, so writing into a one-byte bytes buffer would change it everywhere."""
    _kernels.image_of(FILE, NAME, target)
    assert [bytes([number])[0] for number in range(256)] == list(range(256))


def test_the_error_names_an_unsupported_gpu():
    with pytest.raises(RuntimeError, match=r"compiles for sm_\d+ .*, and not for sm_20"):
        _kernels.image_of(FILE, NAME, "sm_20")


def test_the_error_names_a_kernel_that_does_not_compile():
    with pytest.raises(
        RuntimeError, match=r"(?s)NVRTC \S+ cannot compile no_kernel of flow/cuda/scale_gradient.cuh.*undefined"
    ):
        _kernels.image_of(FILE, "no_kernel", "sm_90")


def test_the_error_without_a_compiler_gives_commands(monkeypatch):
    monkeypatch.setattr(_kernels, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r'pip install "cuda-bindings==\d+.\*" "nvidia-cuda-nvrtc==\d+.\*"`, or'):
        _kernels.image_of(FILE, NAME, "sm_90")


def test_nvcc_replaces_a_missing_nvrtc():
    try:
        using = _kernels.Nvcc()
    except ImportError:
        pytest.skip("there is no nvcc")
    image = _kernels._compiled(using, FILE, NAME, "sm_90")
    assert image.code.startswith(b"\x7fELF")
    assert image.entry == _kernels.image_of(FILE, NAME, "sm_90")[0].entry
    assert f".entry {image.entry}(".encode() in using.compile(FILE, NAME, "compute_90")[0]


def test_packaged_images_come_first(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(_kernels, "PACKAGED", tmp_path / "kernels")
    image, _ = _kernels.compile_into(tmp_path / "kernels", FILE, NAME, "sm_90")
    monkeypatch.setattr(_kernels, "compiler", lambda: None)
    assert _kernels.image_of(FILE, NAME, "sm_90") == (image, "package")
    assert not cache.exists()


def image_in(rank, folder):
    os.environ["GRADSCALE_CACHE_DIR"] = folder
    assert _kernels.image_of(FILE, NAME, "sm_90")[0].code


@one_server
@pytest.mark.any_version
def test_processes_share_a_folder(cache):
    start_processes(2, image_in, str(cache))
    assert json.loads(only_file(cache).read_bytes().partition(b"\n")[0])["registers"] > 0
    assert _kernels.image_of(FILE, NAME, "sm_90")[1] == "cache"


def test_calls_report_their_kernels():
    x, y = torch.zeros(8, requires_grad=True), torch.ones(8)
    call = lambda: gs.scale_gradient(x, torch.tensor([0.5])).backward(y)
    assert precompile.kernels_of([call, call]) == [(FILE, NAME)]
    x.grad = None
    call()
    assert x.grad.tolist() == [0.5] * 8  # computed, and not only reported


def test_kernels_for_short_and_long_lists_of_tensors_are_compiled():
    names = {name for _, name in precompile.kernels_of(precompile.other_calls(torch.float32))}
    for size in (8000, 32000):  # bytes
        of_tensors, of_units = (f"RangeList<{item}, {size}>" for item in ("ListedTensor", "UnitRange"))
        assert names >= {f"chunk_statistics<true, {of_tensors}>", f"tensor_statistics<{of_tensors}>"}
        assert names >= {f"sums_of_squares<{of_tensors}>", f"scaled_units<RangeList<WholeRange, {size}>>"}
        assert names >= {f"{kernel}<{of_units}>" for kernel in ("unit_sums", "unit_norms", "scaled_units")}


@pytest.mark.parametrize("into", [False, pytest.param(True, marks=pytest.mark.any_version)])
def test_command(cache, tmp_path, into, capsys, monkeypatch):
    monkeypatch.setattr(precompile, "loss_calls", lambda dtype, actions: [])
    monkeypatch.setattr(precompile, "other_calls", lambda dtype: [scaled])
    for home in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(home, str(tmp_path))
    folder = tmp_path / "kernels" if into else cache
    arguments = ["--arch", "sm_80", *(["9.0", "--into=~/kernels"] if into else []), "--dtype", "float32"]
    assert precompile.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["gpu", "registers", "shared", "spilled", "seconds", "from", "kernel"]
    assert any(line.startswith("sm_80") and line.endswith("scale_dense<float>") for line in lines)
    assert lines[-1].endswith(f"in {folder}")
    assert len(list(folder.iterdir())) == len(lines) - 2


def test_command_passes_if_a_kernel_spills(capsys, monkeypatch):
    image = _kernels.Image(b"", "entry", 80, 0, 4)
    monkeypatch.setattr(_kernels, "image_of", lambda *kernel: (image, "NVRTC 13.2"))
    assert precompile.main(["--arch", "90", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ kernels spill registers to memory, which may be slower", lines[-2])


def test_command_fails_if_a_kernel_does_not_compile(capsys, monkeypatch):
    image_of = _kernels.image_of

    def fails_for_one(file, name, gpu):
        if name == "scale_dense<float>" and gpu == "sm_80":
            raise RuntimeError("NVRTC cannot compile it")
        return _kernels.Image(b"", "entry", 80, 0, 0), "cache"

    monkeypatch.setattr(_kernels, "image_of", fails_for_one)
    assert precompile.main(["--arch", "80", "90", "--dtype", "float32"]) == 1
    written = capsys.readouterr()
    assert written.out.count("scale_dense<float>") == 1  # for sm_90
    assert written.err == (
        "gradscale_ext compile: 1 kernel could not be compiled; scale_dense<float> for sm_80: NVRTC cannot compile it\n"
    )
    monkeypatch.setattr(_kernels, "image_of", image_of)
    monkeypatch.setattr(_kernels, "compiler", lambda: None)
    assert precompile.main(["--arch", "80", "--dtype", "float32"]) == 1
    assert "there is no compiler here: install NVRTC with" in capsys.readouterr().err


def test_command_fails_if_the_folder_cannot_be_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(precompile, "loss_calls", lambda dtype, actions: [])
    monkeypatch.setattr(precompile, "other_calls", lambda dtype: [scaled])
    (tmp_path / "file").write_text("")
    assert precompile.main(["--arch", "90", "--dtype", "float32", f"--into={tmp_path / 'file'}"]) == 1
    assert "gradscale_ext compile: 1 kernel could not be compiled; scale_dense<float>" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "x"], "argument --arch: expected a compute capability such as 90 or 9.0, got 'x'"),
        (["--arch", "9.a"], "argument --arch: expected a compute capability such as 90 or 9.0, got '9.a'"),
        (["--arch", "90", "--actions", "0"], "argument --actions: expected an integer of at least 1, got '0'"),
        (["--arch", "90", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_command_with_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        precompile.main(arguments)
    assert message in capsys.readouterr().err


def test_command_without_a_gpu_needs_arch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="no GPU found; name the GPUs to compile for, as in --arch 90") as info:
        precompile.main([])
    assert isinstance(info.value.code, str)  # Python prints it, and exits with 1


def scaled(size=1000):
    x = torch.zeros(size, requires_grad=True)
    gs.scale_gradient(x, torch.tensor([0.25])).backward(torch.ones(size))
    return x.grad


def test_a_kernel_runs_through_the_driver(stand_in):
    assert torch.equal(scaled(), torch.full((1000,), 0.25))


def test_threads_that_need_the_same_kernel(stand_in):
    results = []
    threads = [threading.Thread(target=lambda: results.append(scaled(5003))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(result, torch.full((5003,), 0.25)) for result in results)


def test_nothing_is_loaded_during_a_capture(stand_in):
    x = torch.zeros(7, dtype=torch.float16, requires_grad=True)

    def scale():
        x.grad = None
        gs.scale_gradient(x, torch.tensor([0.125])).backward(torch.ones(7, dtype=torch.float16))

    stand_in.gradscale_pretend_capture(1)
    try:
        expected = r"not loaded yet.*while a CUDA graph is captured.*tensors of the same shapes, dtypes and alignment"
        with pytest.raises(RuntimeError, match=expected):
            scale()
    finally:
        stand_in.gradscale_pretend_capture(0)
    scale()
    stand_in.gradscale_pretend_capture(1)
    scale()
    stand_in.gradscale_pretend_capture(0)
    assert x.grad.tolist() == [0.125] * 7


def _half_of(dtype):
    x = torch.zeros(7, dtype=dtype, requires_grad=True)
    gs.scale_gradient(x, torch.tensor([0.5])).backward(torch.ones(7, dtype=dtype))
    return x.grad


def test_other_images_are_tried_if_one_does_not_load(stand_in, tmp_path, monkeypatch):
    """The simulated driver loads PTX only, and refuses the machine code of the package and of the compiler."""
    asked = []

    def images(*arguments):
        asked.append(arguments)
        return _kernels.code_and_entry(*arguments)

    monkeypatch.setattr(_kernels, "PACKAGED", tmp_path / "kernels")
    _kernels.compile_into(tmp_path / "kernels", FILE, "scale_dense<double>", "sm_90")
    _C.set_kernel_images(images)
    assert _half_of(torch.float64).tolist() == [0.5] * 7
    assert [len(errors) for *_, errors in asked] == [0, 1, 2]
    assert {arguments[:4] for arguments in asked} == {(FILE, "scale_dense<double>", 9, 0)}


def test_the_error_lists_the_images_that_the_driver_cannot_load(tmp_path, monkeypatch):
    kernel = (FILE, NAME, 9, 0)
    monkeypatch.setattr(_kernels, "PACKAGED", tmp_path / "kernels")
    packaged, _ = _kernels.compile_into(tmp_path / "kernels", FILE, NAME, "sm_90")
    version = _kernels.compiler().version
    assert _kernels.code_and_entry(*kernel) == (packaged.code, packaged.entry)
    assert _kernels.code_and_entry(*kernel, ["a"])[0].startswith(b"\x7fELF")
    assert b".target sm_90" in _kernels.code_and_entry(*kernel, ["a", "b"])[0]
    expected = f"{NAME} for sm_90 (package: a; {version}, sm_90: b; PTX of {version}, compute_90: c); update the NVIDIA"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        _kernels.code_and_entry(*kernel, ["a", "b", "c"])
    monkeypatch.setattr(_kernels, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"\(package: a; the kernel .* there is no compiler here: install NVRTC"):
        _kernels.code_and_entry(*kernel, ["a"])


def test_ptx_of_an_older_gpu_is_tried_once():
    """For a GPU that is newer than the compiler, the first image is PTX already."""
    assert b".target sm_" in _kernels.code_and_entry(FILE, NAME, 99, 9)[0]
    with pytest.raises(RuntimeError, match=r"for sm_999 \(NVRTC [\d.]+, compute_\d+: too new\); update the NVIDIA"):
        _kernels.code_and_entry(FILE, NAME, 99, 9, ["too new"])


def test_arguments_above_4_kb_need_a_driver_for_cuda_12_1(stand_in, monkeypatch):
    monkeypatch.setenv("PTX_CUDA", "12000")
    _C.use_driver_for_cpu(str(DRIVER))
    expected = (
        r"supports CUDA 12\.0 at most, but the kernel .* need a driver for CUDA 12\.1 or newer; update the driver"
    )
    with pytest.raises(RuntimeError, match=expected):
        gs.l2_loss([torch.ones(3, requires_grad=True)])
    assert _half_of(torch.float32).tolist() == [0.5] * 7  # whose arguments are smaller
    monkeypatch.setenv("PTX_CUDA", "12010")
    _C.use_driver_for_cpu(str(DRIVER))
    assert gs.l2_loss([torch.ones(3, requires_grad=True)]).item() == 1.5


def test_an_error_of_the_compiler_reaches_the_caller(stand_in):
    def fail(*kernel):
        raise RuntimeError("it does not compile")

    _C.set_kernel_images(fail)
    x = torch.zeros(7, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="it does not compile"):
        gs.scale_gradient(x, torch.tensor([0.5])).backward(torch.ones(7, dtype=torch.bfloat16))
