"""MX and NVFP4: what PyTorch's dtypes say of our scales, the blocked layout, scaled products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import CUDA, EMULATED_IN_FULL, TORCH
from tile_kernels import quant
from tile_kernels.integrations import mx

E8M0 = torch.float8_e8m0fnu
VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def values(rows: int, channels: int) -> torch.Tensor:
    torch.manual_seed(0)
    scale = torch.exp2(torch.randint(-20, 20, (rows, channels // 32)).float())
    return (torch.randn(rows, channels) * scale.repeat_interleave(32, 1)).bfloat16()


@pytest.mark.parametrize("packed", [False, True])
def test_scales_are_the_exponents(packed: bool) -> None:
    """PyTorch's conversion of the bytes to float32 gives the scales of the cast back."""
    x = values(9, 32 * 6)
    _, sf = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True)
    given = sf
    if packed:
        layout = {"use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True}
        _, given = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True, **layout)
        assert given.dtype == torch.int32
    scales = mx.mx_scales(given, 6)
    assert scales.dtype == E8M0
    assert scales.is_contiguous()
    assert torch.equal(scales.float(), sf)


def test_mxfp8_and_mxfp4_hold_the_values() -> None:
    """Data times scale, both by PyTorch's dtypes, is what `cast_back` gives."""
    x = values(5, 64)
    pair = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True)
    data, scales = mx.mx_operand(*pair)
    found = data.float().view(5, 2, 32) * scales.float()[:, :, None]
    expected = tile_kernels.quant.per_token_cast_back(pair, "fp32", 32)
    assert torch.equal(found.flatten(1), expected)
    data4, sf4 = tile_kernels.quant.per_token_cast(x, "e2m1", 32, round_sf=True)
    viewed, scales4 = mx.mx_operand(data4, sf4)
    assert viewed.dtype == torch.float4_e2m1fn_x2
    assert viewed.data_ptr() == data4.data_ptr()
    assert torch.equal(scales4.float(), sf4)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (200, 16), (0, 4)])
def test_blocked_layout(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = torch.randint(1, 255, shape, dtype=torch.uint8)
    blocked = mx.to_blocked(scales)
    tiles = -(-columns // 4)
    assert blocked.shape == (512 * -(-rows // 128) * tiles,)
    for row in range(0, rows, 7):
        for column in range(columns):
            tile = row // 128 * tiles + column // 4
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert blocked[at] == scales[row, column]
    assert int((blocked != 0).sum()) == rows * columns  # padding is zero
    assert torch.equal(mx.from_blocked(blocked, rows, columns), scales)
    assert mx.to_blocked(scales.view(E8M0)).dtype == E8M0


def test_blocked_layout_of_groups() -> None:
    """Each group alone, one after the other; what is left is zero."""
    scales = torch.randint(1, 255, (300, 6), dtype=torch.uint8)
    for ends in ([300], [1, 130, 130, 300], [0, 5, 200], [128, 256]):
        blocked = mx.to_blocked(scales, torch.tensor(ends).int())
        assert blocked.shape == (-(-(300 + 127 * len(ends)) // 128) * 128, 8)
        pairs = zip([0, *ends], ends)
        expected = torch.cat([mx.to_blocked(scales[a:b]) for a, b in pairs])
        flat = blocked.flatten()
        assert torch.equal(flat[: len(expected)], expected)
        assert flat[len(expected) :].eq(0).all()
    e8m0 = mx.to_blocked(scales.view(E8M0), torch.tensor([300]).int())
    assert e8m0.dtype == E8M0


# ---- casts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
def test_mx_and_back(fmt: str, ground: tuple[str, str]) -> None:
    backend, device = ground
    x = values(7, 96)
    x[6] *= 2.0**-70
    x = x.to(device)
    with tile_kernels.backend(backend):
        data, scales = mx.to_mx(x, fmt)
        back = mx.from_mx(data, scales, "fp32")
        assert torch.equal(mx.from_mx(data, scales), back.bfloat16())
    assert scales.dtype == E8M0
    assert data.dtype == (torch.float8_e4m3fn if fmt == "e4m3" else torch.float4_e2m1fn_x2)
    most = x.float().view(7, 3, 32).abs().amax(2, keepdim=True)
    exponent = torch.ceil(torch.log2(most.double() / (448 if fmt == "e4m3" else 6)))
    assert torch.equal(scales.double(), torch.exp2(exponent)[..., 0])
    step = 1 / 15 if fmt == "e4m3" else 1 / 3  # from a code to the middle of the next, at most
    error = (back - x.float()).view(7, 3, 32).abs()
    least = most / (448 if fmt == "e4m3" else 6)
    assert (error <= torch.maximum(x.float().view(7, 3, 32).abs() * step, least)).all()
    zeros = mx.to_mx(torch.zeros(1, 32, device=device), fmt)
    assert mx.from_mx(*zeros).eq(0).all()
    again = mx.to_mx(back, fmt)
    assert torch.equal(mx.from_mx(*again, "fp32"), back)


@pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
def test_nvfp4_and_back(ground: tuple[str, str]) -> None:
    """Codes times scales times the scale of all, by PyTorch's dtypes; the error is that of e2m1."""
    backend, device = ground
    torch.manual_seed(0)
    x = (torch.randn(6, 64) * 1e4).to(device)
    with tile_kernels.backend(backend):
        for given in (None, 2.5, torch.tensor(3.0, device=device)):
            data, scales, global_sf = mx.to_nvfp4(x, given)
            assert (data.dtype, scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
            assert global_sf.dtype == torch.float32
            back = mx.from_nvfp4(data, scales, global_sf, "fp32")
            codes = data.view(torch.uint8).cpu()
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            pairs = torch.stack([codes & 15, codes >> 4], 2).flatten(1).long()
            signed = table[pairs & 7] * (1 - 2 * (pairs >> 3))
            product = scales.float().cpu() * global_sf.cpu()
            expected = signed * product.repeat_interleave(16, 1)
            torch.testing.assert_close(back.cpu(), expected, rtol=1e-6, atol=0)
            if given is None:
                assert (back - x).norm() / x.norm() < 0.12
                assert scales.float().max() == 448
        zero = mx.to_nvfp4(torch.zeros(2, 16, device=device))
        assert mx.from_nvfp4(*zero).eq(0).all()
        assert zero[2].item() == 1
        assert mx.to_nvfp4(torch.zeros(0, 16, device=device))[0].shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
def test_nvfp4_of_infinities_and_nan(dtype: torch.dtype, ground: tuple[str, str]) -> None:
    """They concern no other group: the scale of all stays finite, and is that of the others."""
    backend, device = ground
    x = torch.full((2, 32), 6e5, dtype=dtype, device=device)
    expected = mx.to_nvfp4(x)
    with_nan, with_inf = x.clone(), x.clone()
    with_nan[0, 0], with_inf[0, 0] = torch.nan, -torch.inf
    with tile_kernels.backend(backend):
        data, scales, global_sf = mx.to_nvfp4(with_nan)
        assert torch.equal(global_sf, expected[2])
        assert torch.equal(mx.from_nvfp4(data, scales, global_sf)[1], mx.from_nvfp4(*expected)[1])
        data, scales, global_sf = mx.to_nvfp4(with_inf)
        back = mx.from_nvfp4(data, scales, global_sf, "fp32")
    assert torch.equal(global_sf.cpu(), torch.tensor(torch.finfo(dtype).max / (6 * 448)))
    assert back[0, 0] < -3e38
    assert back.isfinite().all()


# ---- products -----------------------------------------------------------------------------------


def operand(kind: str, rows: int, channels: int, device: str, seed: int) -> tuple[Any, Any]:
    """A quantized matrix and its values; the scales of rows differ by large factors."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels, generator=draw)
    x = (x * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=draw).float())).to(device)
    if kind == "mx":
        pair = mx.to_mx(x)
        return pair, mx.from_mx(*pair, "fp32")
    if kind == "mxfp4":
        pair = mx.to_mx(x, "e2m1")
        return pair, mx.from_mx(*pair, "fp32")
    if kind == "nvfp4":
        data, scales, _ = mx.to_nvfp4(x, 1.0)
        return (data, scales), mx.from_nvfp4(data, scales, 1.0, "fp32")
    if kind == "128x128":
        pair = quant.per_block_cast(x, "e4m3", (128, 128))
        return pair, quant.cast_back(pair, "fp32", (128, 128))
    size = channels if kind == "row" else 128
    pair = quant.per_token_cast(x, "e4m3", size)
    return pair, quant.per_token_cast_back(pair, "fp32", size)


def check_product(
    kinds: tuple[str, str], device: str, functional: bool = False, channels: int = 384
) -> None:
    a, a_values = operand(kinds[0], 144, channels, device, 0)
    b, b_values = operand(kinds[1], 256, channels, device, 1)
    if functional:
        product = torch.nn.functional.scaled_mm(**mx.functional_scaled_mm_arguments(a, b))
    else:
        product = torch._scaled_mm(**mx.scaled_mm_arguments(a, b))
    expected = a_values.double() @ b_values.double().T
    error = (product.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 4e-3


@pytest.mark.parametrize("functional", [False, True])
def test_product_on_a_cpu(functional: bool) -> None:
    if VERSION < (2, 12):
        with pytest.raises(RuntimeError, match=r"per-tensor scaling for CPU|Could not run"):
            check_product(("row", "row"), "cpu", functional)
    else:
        check_product(("row", "row"), "cpu", functional)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [384, 512])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kinds", [("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")])
def test_product_on_a_hopper(kinds: tuple[str, str], functional: bool, channels: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the product with scales in blocks of 128 needs a Hopper")
    if kinds[1] == "128x128" and not functional and channels % 512:
        pytest.skip("torch._scaled_mm has no product with these scales")
    with tile_kernels.backend("tilelang"):
        check_product(kinds, "cuda", functional, channels)


KINDS = [
    ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("mx", "mx"), ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
]  # fmt: skip


@pytest.mark.parametrize("kinds", KINDS)
def test_shapes_pass_the_checks_of_pytorch(kinds: tuple[str, str]) -> None:
    """PyTorch's own check of the operator, which knows each kind of scales, without a device."""
    channels = 512 if kinds[1] == "128x128" else 384
    if kinds[1] == "mxfp4" and VERSION < (2, 12):  # which takes bytes for channels
        channels = 128
    a, _ = operand(kinds[0], 144, channels, "cpu", 0)
    b, _ = operand(kinds[1], 256, channels, "cpu", 1)
    given = mx.scaled_mm_arguments(a, b)
    assert meta_product(given).shape == (144, 256)
    columns = given["scale_b"]
    if kinds[1] == "128x128":  # the strides that `is_blockwise_128x128_scaling` of PyTorch wants
        assert (tuple(columns.shape), columns.stride()) == ((4, 2), (1, 4))
        assert torch.equal(columns, b[1].t())
    if kinds[0] == "1x128":
        assert given["scale_a"].stride() == (1, 144)
        given["scale_a"] = given["scale_a"][:, :2]
        with pytest.raises(RuntimeError, match=r"[Ii]nvalid"):
            meta_product(given)


def test_blocks_whose_columns_cublas_reads_elsewhere() -> None:
    """Three scales in a column: no layout suits both `torch._scaled_mm` and cuBLAS."""
    a, _ = operand("1x128", 144, 384, "cpu", 0)
    b, _ = operand("128x128", 256, 384, "cpu", 1)
    with pytest.raises(ValueError, match=r"K must be a multiple of 512 with .*, got 384"):
        mx.scaled_mm_arguments(a, b)
    one, _ = operand("128x128", 128, 384, "cpu", 1)  # one column: its stride has no meaning
    assert mx.scaled_mm_arguments(a, one)["scale_b"].shape == (3, 1)


@pytest.mark.parametrize("kinds", KINDS)
def test_shapes_pass_the_checks_of_the_public_function(kinds: tuple[str, str]) -> None:
    """`torch.nn.functional.scaled_mm` compares shapes and strides with those of each recipe."""
    # The check takes bytes of packed MXFP4 for channels, which differ in 384, but not in 128.
    channels = 128 if kinds[0] == "mxfp4" else 384
    a, _ = operand(kinds[0], 144, channels, "cpu", 0)
    b, _ = operand(kinds[1], 256, channels, "cpu", 1)
    if kinds[0] == "nvfp4":
        a, b = (mx.to_nvfp4(torch.randn(rows, 384)) for rows in (144, 256))
    given = mx.functional_scaled_mm_arguments(a, b)
    assert functional_meta_product(given).shape == (144, 256)
    if kinds[1] == "128x128":
        blocks = given["scale_b"][0]
        assert (tuple(blocks.shape), blocks.stride()) == ((4, 2), (1, 4))
        assert torch.equal(blocks[:3], b[1].t())
        assert blocks[3].eq(0).all()
        given["scale_b"] = [blocks[:3]]
    elif kinds[0] == "nvfp4":
        assert [each.name for each in given["scale_recipe_a"]] == ["BlockWise1x16", "TensorWise"]
        assert torch.equal(given["scale_a"][1], a[2].reshape(1))
        given["scale_b"] = given["scale_b"][::-1]
    else:
        given["scale_a"] = [given["scale_a"][0][:1]]
    if VERSION < (2, 14):  # which looks at scales with a GPU only
        with pytest.raises((RuntimeError, ValueError), match="scal"):
            functional_meta_product(given)


def functional_meta_product(given: dict[str, Any]) -> torch.Tensor:
    moved: dict[str, Any] = {}
    for key, each in given.items():
        if isinstance(each, list) and isinstance(each[0], torch.Tensor):
            moved[key] = [scale.to("meta") for scale in each]
        else:
            moved[key] = each.to("meta") if isinstance(each, torch.Tensor) else each
    return torch.nn.functional.scaled_mm(**moved)


def meta_product(given: dict[str, Any], name: str = "_scaled_mm") -> torch.Tensor:
    moved = {
        key: each.to("meta") if isinstance(each, torch.Tensor) else each
        for key, each in given.items()
    }
    return getattr(torch, name)(**moved)


def grouped(kind: str, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a grouped product of three groups, one empty; and the product."""
    ends = torch.tensor([40, 40, 144], dtype=torch.int32, device=device)
    a, a_values = operand(kind, 144, 384, device, 0)
    pairs = [operand(kind, 256, 384, device, 1 + e) for e in range(3)]
    b = tuple(torch.stack([pair[0][i] for pair in pairs]) for i in range(2))
    first = a_values[:40].double() @ pairs[0][1].double().T
    last = a_values[40:].double() @ pairs[2][1].double().T
    return mx.scaled_grouped_mm_arguments(a, b, ends), torch.cat([first, last])


@pytest.mark.parametrize("kind", ["row", "mx"])
def test_shapes_of_grouped_products(kind: str) -> None:
    given, product = grouped(kind, "cpu")
    assert meta_product(given, "_scaled_grouped_mm").shape == product.shape
    given["scale_b"] = given["scale_b"][:, :5]
    with pytest.raises(RuntimeError, match="scale"):
        meta_product(given, "_scaled_grouped_mm")


@pytest.mark.gpu
def test_grouped_product_on_a_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the grouped product with scales of rows needs a Hopper")
    with tile_kernels.backend("tilelang"):
        given, product = grouped("row", "cuda")
    found = torch._scaled_grouped_mm(**given).double()
    assert ((found - product).norm(dim=1) / product.norm(dim=1)).max() < 4e-3


@pytest.mark.parametrize("rows", [1, 16, 144])
@pytest.mark.parametrize("columns", [1, 128, 256])
def test_kinds_of_few_channels(rows: int, columns: int) -> None:
    """Up to 128 channels, scales of rows and of groups have the same shape: the other decides."""
    by_rows, _ = operand("row", rows, 128, "cpu", 0)
    for kind, expected in (("row", "RowWise"), ("1x128", "RowWise"), ("128x128", "")):
        other, _ = operand(kind, columns, 128, "cpu", 1)
        found = mx.functional_scaled_mm_arguments(by_rows, other)
        recipes = found["scale_recipe_a"][0].name, found["scale_recipe_b"][0].name
        if expected or columns == 1:  # a block of one row is a row
            assert recipes == ("RowWise", "RowWise")
            continue
        assert recipes == ("BlockWise1x128", "BlockWise128x128")
        assert found["scale_b"][0].stride() == (1, 4)
        if columns == 128:
            assert mx.scaled_mm_arguments(by_rows, other)["scale_b"].shape == (1, 1)
        else:
            with pytest.raises(ValueError, match="K must be a multiple of 512 with scales of bl"):
                mx.scaled_mm_arguments(by_rows, other)
    single, _ = operand("1x128", 1, 256, "cpu", 0)
    blocks, _ = operand("128x128", 256, 256, "cpu", 1)
    found = mx.functional_scaled_mm_arguments(single, blocks)
    assert found["scale_recipe_a"][0].name == "BlockWise1x128"
    for function in (mx.functional_scaled_mm_arguments, mx.scaled_mm_arguments):
        with pytest.raises(ValueError, match="a must have scales of rows or of groups of channels"):
            function(blocks, blocks)


def test_operands_that_do_not_fit() -> None:
    blocked = mx.to_blocked(torch.ones(3, 5, dtype=torch.uint8))
    for given, message in (
        ((blocked.float(), 3, 5), "must be a tensor with elements of one byte, got torch.float32"),
        (([1], 3, 5), "must be a tensor with elements of one byte, got list"),
        ((blocked, 300, 5), "must have 3072 bytes, got 1024"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^from_blocked: blocked {message}"):
            mx.from_blocked(*given)
    with pytest.raises(TypeError, match=r"^from_blocked: rows must be an int, got float"):
        mx.from_blocked(blocked, 3.0, 5)
    strided = torch.stack([blocked, blocked], 1)[:, 0]
    assert mx.from_blocked(strided, 3, 5).eq(1).all()
    a, _ = operand("row", 16, 256, "cpu", 0)
    b, _ = operand("1x128", 32, 256, "cpu", 1)
    both = mx.scaled_mm_arguments
    with pytest.raises(ValueError, match="scaled_mm_arguments: b must have scales of the kind row"):
        both(a, b)
    with pytest.raises(
        ValueError, match=r"the scales of a must be one of \[16, 1\] torch.float32, "
    ):
        both((a[0], a[1].bfloat16()), b)
    with pytest.raises(ValueError, match=r"b must have rows of 256 torch.float8_e4m3fn like a"):
        both(a, operand("row", 32, 128, "cpu", 1)[0])
    with pytest.raises(TypeError, match="a must be a tuple of data and scales, got Tensor"):
        both(a[0], b)
    functional = mx.functional_scaled_mm_arguments
    with pytest.raises(ValueError, match="functional_scaled_mm_arguments: b must have scales of"):
        functional(a, b)
    with pytest.raises(ValueError, match="a and b must both have a scale of all, or neither"):
        functional(mx.to_nvfp4(torch.ones(16, 64)), mx.to_nvfp4(torch.ones(16, 64))[:2])
    with pytest.raises(ValueError, match="a must be NVFP4 to have a scale of all, got row"):
        functional((*a, torch.ones(())), (*a, torch.ones(())))
    with pytest.raises(TypeError, match=r"a.s scale of all must be a torch\.Tensor, got float"):
        functional((*a, 1.0), (*a, 1.0))
    with pytest.raises(TypeError, match=r"b must be a tuple of data, scales and, of NVFP4"):
        functional(a, b[0])
    offsets = torch.tensor([16]).int()
    stacked = tuple(each[None] for each in b)
    with pytest.raises(ValueError, match="a and b must be e4m3 with scales of rows or MX both"):
        mx.scaled_grouped_mm_arguments(b, stacked, offsets)
    with pytest.raises(ValueError, match=r"offsets must have shape \[1\], got \(2,\)"):
        mx.scaled_grouped_mm_arguments(b, stacked, torch.tensor([1, 2]).int())
    with pytest.raises(ValueError, match="to_mx: x must have a multiple of 32 channels, got 40"):
        mx.to_mx(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="to_nvfp4: x must have a multiple of 16 channels, got 40"):
        mx.to_nvfp4(torch.zeros(2, 40))
    with pytest.raises(TypeError, match="from_mx: scales must be float8_e8m0fnu, got float32"):
        mx.from_mx(a[0], torch.ones(16, 8))
    with pytest.raises(TypeError, match="from_nvfp4: scales must be float8_e4m3fn, got float32"):
        mx.from_nvfp4(torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1))


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="mx_scales: sf must be float32 or int32, got bfloat16"):
        mx.mx_scales(torch.ones(2, 2).bfloat16())
    with pytest.raises(ValueError, match=r"mx_scales: num_groups must be in 5\.\.8, got 4"):
        mx.mx_scales(torch.ones(2, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="num_groups must be 2, got 3"):
        mx.mx_scales(torch.ones(2, 2), 3)
    data = torch.zeros(3, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="mx_operand: data must have a multiple of 32 channels"):
        mx.mx_operand(data[:, :40], torch.ones(3, 2))
    with pytest.raises(ValueError, match="mx_operand: sf must have 3 rows like data, got 2"):
        mx.mx_operand(data, torch.ones(2, 2))
    with pytest.raises(TypeError, match="to_blocked: scales must have one byte each"):
        mx.to_blocked(torch.ones(2, 2))
    with pytest.raises(ValueError, match="from_blocked: blocked must have 512 bytes, got 4"):
        mx.from_blocked(torch.zeros(4, dtype=torch.uint8), 1, 1)
