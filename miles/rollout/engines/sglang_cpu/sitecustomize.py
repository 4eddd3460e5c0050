"""Stand-ins that let an SGLang server from PyPI start on a machine without a GPU. Never used where there is one.

Python imports this module by itself when its folder is on PYTHONPATH, in the server and in every process that the
server starts. PyPI has no CPU build of SGLang's kernels, but SGLang imports names from them on the way to code paths
that a small dense or mixture-of-experts model on `--attention-backend torch_native` never takes: those names are
given, and fail when they are called. PyPI's torchvision is a CUDA build: its operators are declared before it is
imported, which is all that transformers' image processors need to be importable.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_KERNELS = ("kvcacheio", "flash_mla", "flash_attn", "allreduce", "mamba", "speculative", "elementwise")
_IMAGES_TO_ONE = (
    "nms(Tensor boxes, Tensor scores, float threshold)",
    "qnms(Tensor boxes, Tensor scores, float threshold)",
)
_ONE_TO_ONE = (
    "roi_align",
    "_roi_align_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "qroi_align",
    "deform_conv2d",
    "_deform_conv2d_backward",
)


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is a GPU kernel; this server runs on a CPU with stand-ins")

    return call


class _Kernels(Loader):
    """Makes `sgl_kernel` and whatever is imported from below it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []

        def attribute(name: str) -> Callable[..., NoReturn]:
            if name.startswith("__"):
                raise AttributeError(name)
            return _absent(f"{module.__name__}.{name}")

        module.__getattr__ = attribute  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, part = name.partition(".")
        if package == "sgl_kernel" and (not part or part in _KERNELS):
            return ModuleSpec(name, _Kernels(), is_package=True)
        if name == "torchvision" and self._library is None:
            self._declare()
        return None

    def _declare(self) -> None:
        import torch

        self._library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # kept: its operators live as long as it does
        for signature in (*_IMAGES_TO_ONE, *(f"{name}(Tensor input, Tensor other)" for name in _ONE_TO_ONE)):
            self._library.define(f"{signature} -> Tensor")


if Path("/proc/driver/nvidia").exists():
    sys.exit("these stand-ins are for machines without a GPU: install SGLang with `miles engine install sglang`")
sys.meta_path.insert(0, _Finder())
