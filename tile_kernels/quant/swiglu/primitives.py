"""The arithmetic of SwiGLU on the device: the mirror of `reference.py`.

Every operation is rounded on its own, divisions included, in exactly the association that the
reference has; nothing is contracted. `l` is the gate and `r` the value, both float32. Reused values
are variables: what a macro is given is written out wherever it is used.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.kernels.common import near_quotient, near_reciprocal


@T.macro
def swiglu_clamp(left, right, clamp):
    """`left[0] = min(l, c)`, `right[0] = min(max(r, -c), c)` in place; NaN stays NaN.

    Comparisons, not minima: those return the other operand for a NaN.
    """
    left[0] = T.Select(left[0] > clamp, clamp, left[0])
    right[0] = T.Select(right[0] > clamp, clamp, right[0])
    right[0] = T.Select(right[0] < -clamp, -clamp, right[0])


@T.macro
def swiglu_denominator(left):
    """`1 + exp(-l)`."""
    return T.ieee_add(T.float32(1), T.exp(-left))


@T.macro
def swiglu_value(left, right):
    """`(l / (1 + exp(-l))) * r`."""
    return T.ieee_mul(T.ieee_fdiv(left, swiglu_denominator(left)), right)


# Gates of a smaller magnitude have a denominator that is far from overflow.
NEAR = 87.0


def near_swiglu(steps: int) -> Any:
    """A macro: `swiglu_value`, bit for bit, for a gate that is `NEAR` or NaN.

    One step of the division is enough for gates in bfloat16, as a test of all of them shows.
    """
    quotient = near_quotient(steps)

    @T.macro
    def near_value(left, right):
        denominator = T.alloc_var(T.float32, init=swiglu_denominator(left))
        reciprocal = T.alloc_var(T.float32, init=near_reciprocal(denominator))
        return T.ieee_mul(quotient(left, denominator, reciprocal), right)

    return near_value


def swiglu_gradients(clamped: bool, near: bool) -> Any:
    """A macro: `act[0]` without weight, and over `left[0]` and `right[0]` their gradients.

    With `s = 1 / (1 + exp(-l))` and `q = (g * w) * s` they are `(q * r) * fma(l, 1 - s, 1)` and
    `q * l`, and `+0` where the clamp changed the half. With `near`, for gates that are `NEAR` or
    NaN, bit for bit the same.
    """

    quotient = near_quotient(2)

    @T.macro
    def gradients(left, right, grad, weight, clamp, act):
        left_clamped = T.alloc_var(T.bool, init=T.bool(False))
        right_clamped = T.alloc_var(T.bool, init=T.bool(False))
        if clamped:
            left_clamped = left[0] > clamp
            right_clamped = T.abs(right[0]) > clamp
            swiglu_clamp(left, right, clamp)
        gate = T.alloc_var(T.float32, init=left[0])
        value = T.alloc_var(T.float32, init=right[0])
        denominator = T.alloc_var(T.float32, init=swiglu_denominator(gate))
        sigmoid = T.alloc_var(T.float32)
        if near:
            sigmoid = near_reciprocal(denominator)
            act[0] = T.ieee_mul(quotient(gate, denominator, sigmoid), value)
        else:
            sigmoid = T.ieee_frcp(denominator)
            act[0] = T.ieee_mul(T.ieee_fdiv(gate, denominator), value)
        shared = T.alloc_var(T.float32, init=T.ieee_mul(T.ieee_mul(grad, weight), sigmoid))
        slope = T.ieee_fmaf(gate, T.ieee_sub(T.float32(1), sigmoid), T.float32(1))
        left[0] = T.ieee_mul(T.ieee_mul(shared, value), slope)
        right[0] = T.ieee_mul(shared, gate)
        if left_clamped:
            left[0] = T.float32(0)
        if right_clamped:
            right[0] = T.float32(0)

    return gradients
