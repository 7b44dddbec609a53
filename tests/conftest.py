"""Options of all tests: a library that runs the CUDA kernels for CPU tensors in a simulator, and compiler tests without
coverage tracing."""

from __future__ import annotations

import functools
import gc
import os
import sys

import pytest

# There is a test process for each processor, and each process has a PyTorch thread for each processor, so waiting
# threads must yield the processor. OpenMP reads this when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser):
    parser.addoption(
        "--simulated-kernels",
        metavar="LIBRARY",
        help="run supported calls on CPU tensors with the CUDA kernels, on this simulated driver (make simulated)",
    )


class Reported:
    """Reports each test that fails, or takes over a minute, as soon as it ends: the log of a killed run names them."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed or report.duration > 60:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n{report.outcome} after {report.duration:.0f} s: {report.when} of {report.nodeid}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reported(config))
    if backend := os.environ.get("GRADSCALE_TEST_BACKEND"):
        import torch

        torch.compile = functools.partial(torch.compile, backend=backend)
    path = config.getoption("--simulated-kernels")
    if path is not None:
        from gradscale_ext import _kernels
        from gradscale_ext._native import _C

        def ptx(file, name, major, minor, errors):
            assert not errors, errors
            image, _ = _kernels.image_of(file, name, f"compute_{major}{minor}")
            return image.code, image.entry

        _C.use_driver_for_cpu(path)
        _C.set_kernel_images(ptx)


def pytest_ignore_collect(collection_path, config):
    """Ignore the tests of CUDA kernels without a GPU or a simulator, unless they are named on the command line."""
    if collection_path.name not in ("test_cuda.py", "test_cuda_rows.py") and collection_path.parent.name != "gpu":
        return None
    import torch

    needed = os.environ.get("GRADSCALE_NEED_GPU") == "1" or config.getoption("--simulated-kernels") is not None
    return None if needed or torch.cuda.is_available() else True


def pytest_collection_modifyitems(config, items):
    if config.getoption("--simulated-kernels") is not None:
        for item in items:
            if item.get_closest_marker("cpu_kernels"):
                item.add_marker(pytest.mark.skip(reason="tests the CPU kernels, which the simulated kernels replace"))


def pytest_runtest_setup():
    """Hide all objects from the garbage collector, because many tests collect, or look at all objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if item.get_closest_marker("compiled") is None:
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
