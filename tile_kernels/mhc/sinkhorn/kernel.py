"""Sinkhorn normalisation of small matrices: a lane per row, a few lanes per matrix, in registers.

A lane holds its row in `y`. A lane sums its row alone; sums along a column are shuffled over the
lanes of the matrix. Both add neighbours first, then neighbouring sums. Matrices whose size is no
power of two have lanes without a row, which hold zeros.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.kernels.common import near_quotient, near_reciprocal
from tile_kernels.runtime.launch import kernel

THREADS = 64
KEPT = 20  # pairs of steps whose divisors are kept for the gradient

near_value = near_quotient(2)


def lanes_of(size: int) -> int:
    """Lanes of a matrix: a power of two."""
    return 1 << (size - 1).bit_length()


# ---- steps --------------------------------------------------------------------------------------


def row_sum(size: int) -> Any:
    """A macro: the sum of a row, neighbours first."""
    spans = [1 << d for d in range(lanes_of(size).bit_length() - 1)]
    pairs = [(c, c + span) for span in spans for c in range(0, size - span, 2 * span)]

    @T.macro
    def summed(values):
        part = T.alloc_local((size,), T.float32)
        for c in T.unroll(size):
            part[c] = values[c]
        for one, other in pairs:
            part[one] = T.ieee_add(part[one], part[other])
        return part[0]

    return summed


def column_sums(size: int) -> Any:
    """A macro: over the values of each lane, those of a row, the sums of columns."""

    @T.macro
    def summed(values):
        for d in T.unroll(lanes_of(size).bit_length() - 1):
            for c in T.unroll(size):  # inside, so that shuffles do not wait for each other
                values[c] = T.ieee_add(values[c], T.shfl_xor(values[c], T.shift_left(1, d)))

    return summed


def divide(size: int, near: bool) -> Any:
    """A macro: the values of a row over `divisor`, in place.

    With `near`, for divisors and values far from overflow and underflow, their common divisor is
    inverted once and quotients come without a branch, rounded alike.
    """

    @T.macro
    def divided(values, divisor):
        if near:
            reciprocal = T.alloc_var(T.float32, init=near_reciprocal(divisor))
            for c in T.unroll(size):
                values[c] = near_value(values[c], divisor, reciprocal)
        else:
            for c in T.unroll(size):
                values[c] = T.ieee_fdiv(values[c], divisor)

    return divided


@T.macro
def quotient(value, divisor, near):
    """`value / divisor`, as in `divide`."""
    if near:
        reciprocal = T.alloc_var(T.float32, init=near_reciprocal(divisor))
        return near_value(value, divisor, reciprocal)
    return T.ieee_fdiv(value, divisor)


def softmax_row(size: int, near: bool) -> Any:
    """A macro: the softmax of a row, in place; zeros in a lane without a row."""
    summed = row_sum(size)
    divided = divide(size, near)

    @T.macro
    def softmax(y, row):
        largest = T.alloc_var(T.float32, init=y[0])
        for c in T.unroll(size - 1):
            largest = T.max(largest, y[c + 1])
        for c in T.unroll(size):
            y[c] = T.exp(T.ieee_sub(y[c], largest))
        total = T.alloc_var(T.float32, init=summed(y))
        divided(y, total)
        if size != lanes_of(size):
            if row >= size:
                for c in T.unroll(size):
                    y[c] = T.float32(0)

    return softmax


def add_eps(size: int) -> Any:
    """A macro: `eps` on top of every element; lanes without a row stay zero."""

    @T.macro
    def added(y, row, eps):
        if row < size:
            for c in T.unroll(size):
                y[c] = T.ieee_add(y[c], eps)

    return added


def normalize_rows(size: int, near: bool) -> Any:
    """A macro: rows over their sums plus `eps`, in place; `divisor[0]` is the lane's own."""
    summed = row_sum(size)
    divided = divide(size, near)

    @T.macro
    def normalized(y, row, eps, divisor):
        divisor[0] = T.ieee_add(summed(y), eps)
        if size != lanes_of(size):
            if row >= size:
                divisor[0] = T.float32(1)
        divided(y, divisor[0])

    return normalized


def normalize_columns(size: int, near: bool) -> Any:
    """A macro: columns over their sums plus `eps`, in place; `divisors` are those of all."""
    summed = column_sums(size)

    @T.macro
    def normalized(y, eps, divisors):
        for c in T.unroll(size):
            divisors[c] = y[c]
        summed(divisors)
        for c in T.unroll(size):
            divisors[c] = T.ieee_add(divisors[c], eps)
            y[c] = quotient(y[c], divisors[c], near)

    return normalized


def sinkhorn(size: int, near: bool) -> Any:
    """A macro: logits to the normalised matrix, in place, by the lanes of a matrix together.

    The lane of row `row` holds it in `y`; lanes without a row hold anything finite. `near` is for
    `eps` in the range of `plan.is_near`.
    """
    softmax = softmax_row(size, near)
    plus_eps = add_eps(size)
    rows = normalize_rows(size, near)
    columns = normalize_columns(size, near)

    @T.macro
    def normalized(y, row, repeat, eps):
        divisor = T.alloc_local((1,), T.float32)
        divisors = T.alloc_local((size,), T.float32)
        softmax(y, row)
        plus_eps(y, row, eps)
        columns(y, eps, divisors)
        for _ in T.serial(repeat - 1):
            rows(y, row, eps, divisor)
            columns(y, eps, divisors)

    return normalized


def load_row(size: int, vector: int) -> Any:
    """A macro: row `row` of matrix `index`, zeros where there is none."""

    @T.macro
    def load(x, index, row, count, y):
        for c in T.unroll(size):
            y[c] = T.float32(0)
        if index < count and row < size:
            for c in T.unroll(size // vector):
                for v in T.vectorized(vector):
                    y[c * vector + v] = x[index, row, c * vector + v]

    return load


def store_row(size: int, vector: int) -> Any:
    """A macro: the mirror of `load_row`."""

    @T.macro
    def store(y, out, index, row, count):
        if index < count and row < size:
            for c in T.unroll(size // vector):
                for v in T.vectorized(vector):
                    out[index, row, c * vector + v] = y[c * vector + v]

    return store


# ---- kernels ------------------------------------------------------------------------------------


def access_bits(size: int, vector: int, near: bool) -> tuple[int, int]:
    return 32 * vector, 32 * vector


@kernel(access_bits=access_bits)
def sinkhorn_normalize(size: int, vector: int, near: bool) -> Any:
    lanes = lanes_of(size)
    load = load_row(size, vector)
    store = store_row(size, vector)
    normalized = sinkhorn(size, near)
    count = T.dynamic("count")

    @T.prim_func
    def normalize(
        x: T.Tensor[(count, size, size), T.float32],
        out: T.Tensor[(count, size, size), T.float32],
        repeat: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(count, THREADS // lanes), threads=THREADS) as block:
            index = block * (THREADS // lanes) + T.get_thread_binding() // lanes
            row = T.get_thread_binding() % lanes
            y = T.alloc_local((size,), T.float32)
            load(x, index, row, count, y)
            normalized(y, row, repeat, eps)
            store(y, out, index, row, count)

    return normalize


@kernel(
    access_bits=access_bits,
    # What is kept in shared memory is each thread's own: no barrier is needed.
    pass_configs={"tl.disable_thread_storage_sync": True},
)
def sinkhorn_backward(size: int, vector: int, near: bool) -> Any:
    """All steps again, then the gradient through each, from the last to the first.

    A step `y' = y / d` has the gradient `(g - sum(g * y')) / d`, and `y = y' * d`: so the divisors
    are kept, not the matrices. Those of `KEPT` pairs of steps at a time; for more, the steps before
    are computed again from the start.
    """
    lanes = lanes_of(size)
    load = load_row(size, vector)
    store = store_row(size, vector)
    softmax = softmax_row(size, near)
    plus_eps = add_eps(size)
    rows = normalize_rows(size, near)
    columns = normalize_columns(size, near)
    sum_row = row_sum(size)
    sum_columns = column_sums(size)
    divided = divide(size, near)
    count = T.dynamic("count")

    @T.macro
    def undo_columns(grad, y, divisors):
        totals = T.alloc_local((size,), T.float32)
        for c in T.unroll(size):
            totals[c] = T.ieee_mul(grad[c], y[c])
        sum_columns(totals)
        for c in T.unroll(size):
            grad[c] = quotient(T.ieee_sub(grad[c], totals[c]), divisors[c], near)

    @T.macro
    def undo_rows(grad, y, divisor):
        products = T.alloc_local((size,), T.float32)
        for c in T.unroll(size):
            products[c] = T.ieee_mul(grad[c], y[c])
        total = T.alloc_var(T.float32, init=sum_row(products))
        for c in T.unroll(size):
            grad[c] = T.ieee_sub(grad[c], total)
        divided(grad, divisor)

    @T.prim_func
    def gradient(
        grad_out: T.Tensor[(count, size, size), T.float32],
        x: T.Tensor[(count, size, size), T.float32],
        grad_x: T.Tensor[(count, size, size), T.float32],
        repeat: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(count, THREADS // lanes), threads=THREADS) as block:
            tx = T.get_thread_binding()
            index = block * (THREADS // lanes) + tx // lanes
            row = tx % lanes
            grad = T.alloc_local((size,), T.float32)
            p = T.alloc_local((size,), T.float32)
            start = T.alloc_local((size,), T.float32)  # after the first step
            y = T.alloc_local((size,), T.float32)
            first_divisors = T.alloc_local((size,), T.float32)
            divisor = T.alloc_local((1,), T.float32)
            divisors = T.alloc_local((size,), T.float32)
            kept_row = T.alloc_shared((KEPT, THREADS), T.float32)
            kept_columns = T.alloc_shared((KEPT, size, THREADS), T.float32)
            before = T.alloc_var(T.int32)
            now = T.alloc_var(T.int32)
            load(x, index, row, count, p)
            load(grad_out, index, row, count, grad)
            softmax(p, row)
            for c in T.unroll(size):
                start[c] = p[c]
            plus_eps(start, row, eps)
            columns(start, eps, first_divisors)
            segments = T.ceildiv(repeat - 1, KEPT)
            for segment in T.serial(segments):
                before = (segments - 1 - segment) * KEPT
                now = T.min(repeat - 1 - before, KEPT)
                for c in T.unroll(size):
                    y[c] = start[c]
                for _ in T.serial(before):
                    rows(y, row, eps, divisor)
                    columns(y, eps, divisors)
                for i in T.serial(now):
                    rows(y, row, eps, divisor)
                    columns(y, eps, divisors)
                    kept_row[i, tx] = divisor[0]
                    for c in T.unroll(size):
                        kept_columns[i, c, tx] = divisors[c]
                for i in T.serial(now):
                    divisor[0] = kept_row[now - 1 - i, tx]
                    for c in T.unroll(size):
                        divisors[c] = kept_columns[now - 1 - i, c, tx]
                    undo_columns(grad, y, divisors)
                    for c in T.unroll(size):
                        y[c] = T.ieee_mul(y[c], divisors[c])
                    undo_rows(grad, y, divisor[0])
                    for c in T.unroll(size):
                        y[c] = T.ieee_mul(y[c], divisor[0])
            undo_columns(grad, start, first_divisors)
            undo_rows(grad, p, T.float32(1))
            for c in T.unroll(size):
                grad[c] = T.ieee_mul(grad[c], p[c])
            store(grad, grad_x, index, row, count)

    return gradient
