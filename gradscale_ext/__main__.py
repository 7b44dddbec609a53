"""`python -m gradscale_ext`: versions, what the extension was built with, what runs here, and a self-check."""

from __future__ import annotations

import platform
import sys

import torch

import gradscale_ext as gs

from ._library import _C


def _self_check() -> str | None:
    """What is wrong, or None: a fused loss and its gradient against the reference."""
    logits = torch.linspace(-3, 3, 21, dtype=torch.float64).repeat(2, 1).requires_grad_()
    heads = {"value": gs.TwoHot(gs.Support(-10, 10, 21))}
    arguments = (heads, {"value": [gs.scale_gradient(logits, 0.5)]}, {"value": [logits.detach()[:, 3]]})
    results = []
    for function in (gs.multi_step_loss, gs.reference.multi_step_loss):
        loss = function(*arguments).loss
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    (loss, gradient), (expected_loss, expected_gradient) = results
    if torch.allclose(loss, expected_loss) and torch.allclose(gradient, expected_gradient):
        return None
    return f"the fused loss {loss.item()} or its gradient differs from the reference {expected_loss.item()}"


def main() -> int:
    """Print the report; the exit status is 1 when the self-check fails."""
    cuda = _C.cuda_version or "no (CPU only)"
    print(f"gradscale_ext  {gs.__version__}")
    print(f"python         {platform.python_version()} on {platform.platform()}")
    print(f"torch          {torch.__version__} (the extension was compiled against {_C.torch_version})")
    print(f"CUDA kernels   {cuda}; a GPU is {'present' if torch.cuda.is_available() else 'not present'}")
    print(f"CPU kernels    {_C.cpu_capability()} chosen; {torch.get_num_threads()} threads")
    problem = _self_check()
    print(f"self-check     {problem or 'passed'}")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
