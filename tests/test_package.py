"""Importing, messages about a broken installation, and the docstrings' examples."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import shutil
import subprocess
import sys
import sysconfig

import pytest

import gradscale_ext as gs
from gradscale_ext import __main__, _native
from gradscale_ext.cli import report

MODULES = sorted(module.name for module in pkgutil.walk_packages(gs.__path__, "gradscale_ext."))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("._C")])
def test_doctests(name):
    """Every example of a module runs. Docstrings of attributes, which doctest does not see, have no examples."""
    if name.endswith(".lightning"):
        pytest.importorskip("lightning")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(module):
        if "__resume_at_" not in example.name:  # parts of functions, which torch.compile adds to a module
            runner.run(example)
    assert runner.summarize() == (0, inspect.getsource(module).count(">>> "))


def test_there_are_doctests():
    """The walk finds subpackages too."""
    assert {"gradscale_ext.loss.multi_step", "gradscale_ext.diagnosis.diagnosis"} <= set(MODULES)


def test_every_head_has_an_example():
    for head in (getattr(gs, name) for name in gs.__all__):
        if isinstance(head, type) and getattr(head, "kind", ""):
            assert f"gs.{head.__name__}(" in head.__doc__


def test_public_names_are_documented():
    for name in gs.__all__:
        assert getattr(gs, name).__doc__, name


def test_report():
    done = subprocess.run([sys.executable, "-m", "gradscale_ext"], capture_output=True, text=True, check=True)
    assert "self-check     passed" in done.stdout
    assert gs.__version__ in done.stdout


@pytest.mark.parametrize("main", [__main__.main, lambda: report.without_extension("not compiled")])
def test_version(main, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gradscale_ext", "--version"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out == f"gradscale_ext {gs.__version__}\n"


def test_a_closed_pipe_ends_the_report_silently():
    command = [sys.executable, "-m", "gradscale_ext"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


def test_report_of_a_failed_self_check(capsys, monkeypatch):
    assert __main__.print_report() == 0
    monkeypatch.setattr(
        gs.reference, "multi_step_loss", lambda *a: gs.multi_step_loss(a[0], a[1], {"value": [a[2]["value"][0] + 1]})
    )
    assert __main__.print_report() == 1
    assert "differs from the reference" in capsys.readouterr().out


def test_the_error_explains_an_extension_that_is_missing_or_does_not_load(tmp_path):
    """In a checkout without an in-place build, and after an upgrade of PyTorch: an invalid file stands for an extension
    whose symbols are missing. One process imports both, without the finder of an editable installation."""
    missing, invalid = tmp_path / "missing", tmp_path / "invalid"
    for folder in (missing, invalid):
        ignored = shutil.ignore_patterns("_C.*.so", "_C.*.pyd", "_build.py")
        shutil.copytree(gs.__path__[0], folder / "gradscale_ext", ignore=ignored)
    (invalid / "gradscale_ext" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no library")
    (invalid / "gradscale_ext" / "_build.py").write_text('TORCH_VERSION = "2.11.0"\n')
    script = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
for folder in ({str(missing)!r}, {str(invalid)!r}):
    sys.path[0] = folder
    try:
        import gradscale_ext
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.startswith("gradscale_ext")]:
        del sys.modules[name]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    of_missing, of_invalid = done.stdout.splitlines()
    assert of_missing.startswith("gradscale_ext is not compiled here")
    assert "`python -m pip install -e .`" in of_missing
    assert of_invalid.startswith("gradscale_ext was compiled against PyTorch 2.11.0, but PyTorch")
    assert "`python -m pip install --force-reinstall --no-deps .`" in of_invalid


def test_the_error_explains_another_pytorch(monkeypatch):
    monkeypatch.setattr(_native, "_built", lambda name: "2.11.0")
    message = str(_native._explain(ImportError("undefined symbol: _ZN2at4fooE")))
    assert "compiled against PyTorch 2.11.0" in message
    assert "undefined symbol" in message
    assert "`python -m pip install torch==2.11.0`, or compile gradscale_ext again" in message
    monkeypatch.setattr(_native, "_built", lambda name: None)
    assert "could not be loaded: undefined symbol" in str(_native._explain(ImportError("undefined symbol: x")))


def test_importing_the_package_imports_no_compiler():
    script = (
        "import sys, torch; before = set(sys.modules); import gradscale_ext; new = set(sys.modules) - before; "
        "print(len(new), any(name.startswith(('torch._dynamo', 'torch._inductor', 'sympy')) for name in new))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, has_compiler = done.stdout.split()
    assert int(count) < 100
    assert has_compiler == "False"
