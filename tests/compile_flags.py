"""Prints the flags of setup.py for C++ sources, one a line, as clang-tidy reads them from a compile_flags.txt."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import setup

extension = setup.extension(torch, cpp_extension)
# clang-tidy has no omp.h, which PyTorch's headers include under -fopenmp.
flags = [flag if flag != "-fopenmp" else "-fopenmp-simd" for flag in extension.extra_compile_args["cxx"]]
macros = [*extension.define_macros, ("TORCH_EXTENSION_NAME", "_C")]
folders = [*extension.include_dirs, sysconfig.get_path("include")]
print("-std=c++20", *flags, *(f"-D{name}={value}" for name, value in macros), sep="\n")
print(*(f"-isystem{folder}" for folder in folders), sep="\n")
