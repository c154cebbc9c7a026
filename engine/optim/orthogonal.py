"""Newton-Schulz iterations that replace a matrix by a nearly orthogonal one with the same singular vectors."""

from __future__ import annotations

import torch
from torch import Tensor

# A quintic with the steepest slope at 0 that still ends near 1 (Jordan et al., 2024, kellerjordan.github.io/posts/muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
# Steps between fresh Gram matrices: in half precision the error of a carried one grows with each step.
GRAM_STEPS = (2, 3)
METHODS = ("gram", "standard")


def work_dtype(method: str, device: torch.device) -> torch.dtype:
    """Return the precision of an iteration: bf16 for `standard`; fp16, or fp32 on the CPU, for `gram`."""
    if method == "standard":
        return torch.bfloat16
    return torch.float32 if device.type == "cpu" else torch.float16


def orthogonalize(matrix: Tensor, method: str = "gram", dtype: torch.dtype | None = None) -> Tensor:
    """Return U S V^T for `matrix` U Z V^T, with all of S roughly within [0.7, 1.2].

    Args:
        matrix: shape (..., rows, columns); leading dims are separate matrices.
        method: `standard` iterates on the matrix, `gram` on the smaller of its two Gram matrices, which is cheaper the
            longer the matrix is; both are the same polynomial.
        dtype: precision of the iteration; default by `work_dtype`. The result has this dtype.
    """
    dtype = dtype or work_dtype(method, matrix.device)
    wide = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    # The norm of large fp16 values would overflow, so it is taken before the conversion and in fp32 at least.
    wide = wide.float() if wide.dtype == torch.float16 else wide
    wide = (wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)).to(dtype)
    batch = wide.reshape(-1, *wide.shape[-2:])
    square = wide.size(-2) == wide.size(-1)
    result = (_iterate(batch) if method == "standard" or square else _iterate_on_gram(batch)).view(wide.shape)
    return result.mT if matrix.size(-2) > matrix.size(-1) else result


def _polynomial(gram: Tensor) -> Tensor:
    """b * gram + c * gram @ gram, the matrix that one step adds to a times the identity."""
    _, b, c = COEFFICIENTS
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


def _iterate(x: Tensor) -> Tensor:
    """Apply all steps to a batch of matrices, shape (batch, rows, columns)."""
    for _ in range(NUM_STEPS):
        x = torch.baddbmm(x, _polynomial(x @ x.mT), x, beta=COEFFICIENTS[0])
    return x


def _iterate_on_gram(x: Tensor) -> Tensor:
    """The same steps with x left out: polynomials of one Gram matrix commute, so their product is applied to x at once."""
    scaled_identity = COEFFICIENTS[0] * torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    for num_steps in GRAM_STEPS:
        gram = x @ x.mT
        product = factor = scaled_identity + _polynomial(gram)
        for _ in range(num_steps - 1):
            gram = factor @ gram @ factor
            factor = scaled_identity + _polynomial(gram)
            product = factor @ product
        x = product @ x
    return x
