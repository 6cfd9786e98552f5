import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tile_kernels.testing import numeric
from tile_kernels.testing.numeric import assert_equal, calc_diff, check_bias, count_bytes

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def from_bytes(data: bytes, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8).view(dtype).view(shape)


def message(*args, **kwargs) -> str:
    with pytest.raises(AssertionError) as info:
        assert_equal(*args, **kwargs)
    return str(info.value)


class TestAssertEqual:
    def test_strided_view(self):
        view = torch.arange(32).view(4, 8)[:, :4]
        assert view.stride() == (8, 1)
        assert "strides differ: (8, 1) != (4, 1)" in message(view, view.contiguous())
        assert_equal(view, view.contiguous(), check_stride=False)

    def test_signed_zeros_differ(self):
        text = message(torch.tensor([0.0]), torch.tensor([-0.0]))
        assert "1 of 1 elements" in text
        assert "[0]: 0.0 (0x00000000) != -0.0 (0x80000000)" in text

    def test_equal_nans_are_equal(self):
        assert_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))

    def test_nans_with_other_payloads_differ(self):
        one = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
        two = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
        assert "nan (0x7fc00000) != nan (0x7fc00001)" in message(one, two)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 4)])
    def test_any_dtype_and_shape(self, dtype, shape):
        size = math.prod(shape) * dtype.itemsize
        data = bytes(range(1, size + 1))
        x = from_bytes(data, dtype, *shape)
        assert_equal(x, from_bytes(data, dtype, *shape))
        if size:
            changed = data[:-1] + bytes([data[-1] ^ 1])
            text = message(x, from_bytes(changed, dtype, *shape))
            assert f"contents differ in 1 of {math.prod(shape)} elements" in text
            assert str([n - 1 for n in shape]) + ": " in text

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_non_contiguous(self, dtype):
        data = bytes(range(12 * dtype.itemsize))
        x = from_bytes(data, dtype, 3, 4)
        y = from_bytes(data, dtype, 3, 4)
        assert_equal(x.t(), y.t())
        assert_equal(x[:, ::2], y[:, ::2])
        assert_equal(x[0, ::2], y[0, ::2])
        assert "elements" in message(x.t()[:3], x[:, :3], check_stride=False)

    def test_expanded(self):
        x = torch.tensor([[1.0], [2.0]]).expand(2, 3)
        assert_equal(x, torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), check_stride=False)

    def test_position_is_logical(self):
        x = torch.zeros(3, 5, dtype=torch.int32)
        y = x.clone()
        y[2, 1] = 7
        assert "[1, 2]: 0 != 7" in message(x.t(), y.t())

    def test_lists_the_first_and_counts_all(self, monkeypatch):
        monkeypatch.setattr(numeric, "_SCAN_CHUNK", 16)
        x = torch.zeros(100, dtype=torch.int32)
        y = x.clone()
        y[10::3] = torch.arange(10, 100, 3, dtype=torch.int32)
        lines = message(x, y).splitlines()
        assert "contents differ in 30 of 100 elements" in lines[0]
        listed = [10 + 3 * i for i in range(8)]
        assert [line.strip() for line in lines[1:9]] == [f"[{i}]: 0 != {i}" for i in listed]
        assert lines[9].strip() == "and 22 more"
        assert len(lines) == 10

    def test_dtype(self):
        x = torch.tensor([1, 2], dtype=torch.int32)
        assert "dtypes differ: torch.int32 != torch.float32" in message(x, x.view(torch.float32))
        assert_equal(x, x.view(torch.float32), check_dtype=False)
        assert "sizes differ: 8 bytes" in message(x, x.long(), check_dtype=False)

    def test_dtypes_of_other_widths_compare_bytes(self):
        x = torch.tensor([0x04030201, 0x08070605], dtype=torch.int32)
        y = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
        flags = {"check_dtype": False, "check_shape": False}
        assert_equal(x, y, **flags)
        y[5] = 0xFF
        text = message(x, y, **flags)
        assert "1 of 8 bytes" in text
        assert "byte 5: 0x06 != 0xff" in text

    def test_shape(self):
        x = torch.arange(6)
        y = x.view(2, 3)
        assert "shapes differ: (6,) != (2, 3)" in message(x, y)
        assert_equal(x, y, check_shape=False, check_stride=False)
        y = y.clone()
        y[1, 0] = 9
        assert "[3] and [1, 0]: 3 != 9" in message(x, y, check_shape=False, check_stride=False)
        assert "sizes differ" in message(x, x[:5], check_shape=False)

    def test_same_shape_product_is_not_the_same_shape(self):
        assert "shapes differ" in message(torch.zeros(0, 3), torch.zeros(3, 0))

    def test_strides_of_empty_tensors_are_free(self):
        assert_equal(torch.zeros(0, 8)[:, :4], torch.zeros(0, 4))

    def test_device(self):
        text = message(torch.zeros(1), torch.zeros(1, device="meta"))
        assert "devices differ: cpu != meta" in text

    def test_bool_bytes(self):
        x = torch.tensor([1, 0], dtype=torch.uint8).view(torch.bool)
        y = torch.tensor([165, 0], dtype=torch.uint8).view(torch.bool)
        assert "[0]: True (0x01) != True (0xa5)" in message(x, y)

    def test_complex(self):
        x = torch.tensor([1 + 2j, 3 - 4j])
        assert_equal(x.conj(), torch.tensor([1 - 2j, 3 + 4j]))
        assert "in 1 of 2 elements" in message(x, torch.tensor([1 + 2j, 4 - 5j]))
        assert "[1]: (3-4j)" in message(x, x.conj().resolve_conj())

    def test_gradients_do_not_matter(self):
        x = torch.ones(2, requires_grad=True)
        assert_equal(x, torch.ones(2))
        assert "1 of 2" in message(x, torch.tensor([1.0, 2.0]))

    def test_positional_flags(self):
        x = torch.arange(4, dtype=torch.int32).view(2, 2)
        assert_equal(x.t(), x.t().contiguous().view(torch.float32), False, True, False)

    def test_not_a_tensor(self):
        with pytest.raises(TypeError, match="y must be a tensor, got NoneType"):
            assert_equal(torch.zeros(1), None)

    @settings(deadline=None, max_examples=60)
    @given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]))
    def test_one_flipped_bit_is_found(self, data, dtype):
        rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        size = rows * columns * dtype.itemsize
        content = data.draw(st.binary(min_size=size, max_size=size))
        at = data.draw(st.integers(0, 8 * size - 1))
        changed = bytearray(content)
        changed[at // 8] ^= 1 << (at % 8)
        x = from_bytes(content, dtype, rows, columns)
        assert_equal(x, from_bytes(content, dtype, rows, columns))
        element = at // 8 // dtype.itemsize
        text = message(x, from_bytes(bytes(changed), dtype, rows, columns))
        assert f"in 1 of {rows * columns} elements" in text
        assert f"  [{element // columns}, {element % columns}]: " in text

    @pytest.mark.gpu
    def test_on_the_gpu(self):
        x = torch.randn(64, 65, device="cuda").to(torch.float8_e4m3fn)
        y = x.clone()
        assert_equal(x.t(), y.t())
        y.view(torch.uint8)[3, 5] ^= 1
        assert "1 of 4160 elements" in message(x, y)
        assert "[3, 5]: " in message(x, y)
        assert "devices differ: cuda:0 != cpu" in message(x, x.cpu())


class TestCalcDiff:
    def test_example(self):
        diff = calc_diff(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        assert diff.dtype == torch.float64
        assert diff.shape == ()
        assert float(diff) == pytest.approx(1 / 49, abs=1e-15)

    def test_zero_is_an_integer(self):
        for x in (torch.zeros(3), torch.zeros(0)):
            diff = calc_diff(x, x)
            assert diff == 0
            assert isinstance(diff, int)

    def test_opposite(self):
        x = torch.tensor([1.0, -3.0])
        assert float(calc_diff(x, -x)) == 2.0

    def test_nan_is_never_small(self):
        x = torch.tensor([1.0, math.nan])
        assert not calc_diff(x, x) < 1
        x = torch.tensor([1.0, math.inf])
        assert not calc_diff(x, x) < 1

    def test_uses_double_precision(self):
        x = torch.full((1000,), 1e30)
        assert abs(float(calc_diff(x, x))) < 1e-12

    def test_fp8(self):
        x = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
        y = torch.tensor([1.0, 2.5]).to(torch.float8_e4m3fn)
        assert float(calc_diff(x, y)) == pytest.approx(1 / 49)

    def test_shapes_must_agree(self):
        with pytest.raises(ValueError, match=r"same shape, got \(2,\) and \(2, 1\)"):
            calc_diff(torch.ones(2), torch.ones(2, 1))

    @settings(deadline=None)
    @given(
        st.lists(st.tuples(*[st.integers(-1000, 1000)] * 2), min_size=1).filter(
            lambda pairs: any(x or y for x, y in pairs)
        )
    )
    def test_properties(self, pairs):
        x, y = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        diff = float(calc_diff(x, y))
        assert -1e-12 < diff < 2 + 1e-12
        assert diff == pytest.approx(float(calc_diff(y, x)), abs=1e-12)
        assert diff == pytest.approx(float(calc_diff(3 * x, 3 * y)), abs=1e-12)
        expected = ((x - y) ** 2).sum() / (x * x + y * y).sum()
        assert diff == pytest.approx(float(expected), abs=1e-12)


class TestCheckBias:
    def test_rounding_passes_and_truncation_fails(self):
        ref = torch.randn(4096, 4)
        check_bias(ref.bfloat16(), ref)
        truncated = (ref.view(torch.int32) & -(1 << 16)).view(torch.float32)
        check_bias(truncated, ref)  # towards zero: below for positive, above for negative
        with pytest.raises(AssertionError, match="rounding is biased"):
            check_bias(truncated.abs(), ref.abs())

    def test_empty(self):
        check_bias(torch.zeros(0, 4), torch.zeros(0, 4))

    @pytest.mark.parametrize("n", [399, 400, 401, 402, 403, 1001])
    def test_message_for_any_size(self, n):
        x, ref = torch.zeros(n), torch.ones(n)
        if n < 400:
            check_bias(x, ref)
            return
        with pytest.raises(AssertionError) as info:
            check_bias(x, ref)
        assert f"100.0% of {n} elements lie below" in str(info.value)
        assert f"({n} below, 0 equal, 0 above)" in str(info.value)

    @settings(deadline=None)
    @given(st.integers(1, 3000), st.data())
    def test_matches_the_formula(self, n, data):
        below = data.draw(st.integers(0, n))
        equal = data.draw(st.integers(0, n - below))
        # Keep away from the bound itself, where the floating-point formula may err.
        distance = abs((below + equal / 2) / n - 0.5) - 10 / math.sqrt(n)
        x = torch.ones(n)
        x[:below] = -1
        x[below : below + equal] = 0
        if distance < -1e-9:
            check_bias(x, torch.zeros(n))
        elif distance > 1e-9:
            with pytest.raises(AssertionError):
                check_bias(x, torch.zeros(n))

    def test_bound_is_exclusive(self):
        # n = 1600, r = 0.75: the distance of 0.25 equals 10 / sqrt(1600).
        x = torch.ones(1600)
        x[:1200] = -1
        with pytest.raises(AssertionError):
            check_bias(x, torch.zeros(1600))
        x[1199] = 0
        check_bias(x, torch.zeros(1600))

    def test_fp8(self):
        ref = torch.rand(10000) + 1
        check_bias(ref.to(torch.float8_e4m3fn), ref)
        with pytest.raises(AssertionError):
            check_bias(torch.ones(10000).to(torch.float8_e4m3fn), ref)

    def test_nan_is_a_failure(self):
        with pytest.raises(AssertionError):
            check_bias(torch.full((1000,), math.nan), torch.zeros(1000))

    def test_shapes_must_agree(self):
        with pytest.raises(ValueError, match="same shape"):
            check_bias(torch.ones(4), torch.ones(4, 4))


class TestCountBytes:
    def test_example(self):
        nested = (torch.zeros(2, dtype=torch.bfloat16), [torch.zeros(5, dtype=torch.int64)])
        assert count_bytes(torch.zeros(3, 4), None, nested) == 92

    def test_views_count_what_they_show(self):
        x = torch.zeros(10, 10, dtype=torch.float64)
        assert count_bytes(x[::2, :3]) == 5 * 3 * 8
        assert count_bytes(x[:1].expand(7, 10)) == 560

    def test_nothing(self):
        assert count_bytes() == 0
        assert count_bytes(None, [], ((),), torch.zeros(0, 9)) == 0

    def test_large_sizes(self):
        assert count_bytes(torch.empty(2**40, device="meta")) == 2**42

    def test_other_types(self):
        with pytest.raises(TypeError, match="got int"):
            count_bytes(3)


def test_import_is_light_and_checks_survive_optimisation():
    code = """
import sys
import tile_kernels.testing as t
import torch
print([m for m in ("pytest", "rich", "tilelang", "tvm") if m in sys.modules])
print([hasattr(t, name) for name in "bench numeric generator quant clear_unused_sf".split()])
for check, args in (
    (t.numeric.assert_equal, (torch.zeros(1), torch.ones(1))),
    (t.numeric.check_bias, (torch.zeros(500), torch.ones(500))),
):
    try:
        check(*args)
    except AssertionError:
        print("raised")
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", code],
        cwd=Path(tile_kernels.__file__).parents[1],  # where the package is found uninstalled too
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == ["[]", str([True] * 5), "raised", "raised"]
