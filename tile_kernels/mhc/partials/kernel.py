"""Mixes from partial sums of products and squares, and their gradient."""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.norm_fn.kernel import inverse_norm
from tile_kernels.mhc.partials.plan import THREADS
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def reduce_partials(groups: int, mixes: int, size: int) -> Any:
    """A thread per mix: the parts summed in order, divided by the norm of each group."""
    parts, rows = T.dynamic("parts rows")

    @T.prim_func
    def reduced_mixes(
        mul: T.Tensor[(parts, rows, groups, mixes), T.float32],
        squares: T.Tensor[(parts, rows, groups), T.float32],
        out: T.Tensor[(rows, mixes), T.float32],
        mul_out: T.Tensor[(rows, groups, mixes), T.float32],
        squares_out: T.Tensor[(rows, groups), T.float32],
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows * mixes, THREADS), threads=THREADS) as block:
            entry = block * THREADS + T.get_thread_binding()
            row = T.alloc_var(T.int32, init=entry // mixes)
            mix = T.alloc_var(T.int32, init=entry % mixes)
            total = T.alloc_var(T.float32, init=T.float32(0))
            square = T.alloc_var(T.float32)
            product = T.alloc_var(T.float32)
            if row < rows:
                for g in T.serial(groups):
                    product = mul[0, row, g, mix]
                    square = squares[0, row, g]
                    for i in T.serial(parts - 1):
                        product = T.ieee_add(product, mul[i + 1, row, g, mix])
                        square = T.ieee_add(square, squares[i + 1, row, g])
                    mul_out[row, g, mix] = product
                    if mix == 0:
                        squares_out[row, g] = square
                    product = T.ieee_mul(product, inverse_norm(square, size, eps))
                    if g > 0:
                        product = T.ieee_add(total, product)
                    total = product
                out[row, mix] = total

    return reduced_mixes


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def reduce_partials_backward(groups: int, mixes: int, size: int) -> Any:
    """A thread per group of a token."""
    rows = T.dynamic("rows")

    @T.prim_func
    def reduced_mix_gradients(
        grad: T.Tensor[(rows, mixes), T.float32],
        mul: T.Tensor[(rows, groups, mixes), T.float32],
        squares: T.Tensor[(rows, groups), T.float32],
        mul_grad: T.Tensor[(rows, groups, mixes), T.float32],
        squares_grad: T.Tensor[(rows, groups), T.float32],
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows * groups, THREADS), threads=THREADS) as block:
            entry = block * THREADS + T.get_thread_binding()
            row = T.alloc_var(T.int32, init=entry // groups)
            g = T.alloc_var(T.int32, init=entry % groups)
            total = T.alloc_var(T.float32, init=T.float32(0))
            if row < rows:
                square = T.alloc_var(T.float32, init=squares[row, g])
                inverse = T.alloc_var(T.float32, init=inverse_norm(square, size, eps))
                for mix in T.serial(mixes):
                    mul_grad[row, g, mix] = T.ieee_mul(grad[row, mix], inverse)
                    total = T.ieee_fmaf(grad[row, mix], mul[row, g, mix], total)
                scaled = T.ieee_mul(T.ieee_mul(total, inverse), T.float32(-0.5))
                squares_grad[row, g] = T.ieee_fdiv(
                    scaled, T.ieee_fmaf(eps, T.float32(size), square)
                )

    return reduced_mix_gradients
