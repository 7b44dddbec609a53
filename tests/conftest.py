"""An option for all tests: CPU tensors go through the CUDA kernels, which a library runs in a simulator."""

from __future__ import annotations

import ctypes

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--simulated-kernels",
        metavar="LIBRARY",
        help="run what the CUDA kernels can do for CPU tensors with those of this library (make simulated)",
    )


def pytest_configure(config):
    path = config.getoption("--simulated-kernels")
    if path is not None:
        from gradscale_ext._library import _C

        library = ctypes.CDLL(path)
        library.simulated_device_kernels.restype = ctypes.c_void_p
        _C.use_device_kernels_for_cpu(library.simulated_device_kernels())


def pytest_collection_modifyitems(config, items):
    if config.getoption("--simulated-kernels") is not None:
        for item in items:
            if item.get_closest_marker("cpu_kernels"):
                item.add_marker(pytest.mark.skip(reason="of the CPU's own kernels"))
