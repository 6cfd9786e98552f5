from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.poison import poisoned_empty

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip

ALLOCATORS = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    "empty_varargs": lambda x: torch.empty(*x.shape, dtype=x.dtype, device=x.device),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided(x.shape, (9, 2), dtype=x.dtype, device=x.device),
    "empty_permuted": lambda x: torch.empty_permuted(
        x.shape, (1, 0), dtype=x.dtype, device=x.device
    ),
    "new_empty": lambda x: x.new_empty(x.shape),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, (1, 7)),
}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def storage_bytes(x):
    return torch.tensor([], dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def sample(dtype, device):
    return torch.zeros(3, 4 * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)


# Every allocator, and every dtype with one of them.
CASES = [
    *((name, torch.float32) for name in ALLOCATORS),
    *((name, torch.float4_e2m1fn_x2) for name in ALLOCATORS),
    *(("empty", dtype) for dtype in DTYPES),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), dict.fromkeys(CASES), ids=str)
def test_every_byte_is_poisoned(name, dtype, device):
    allocate = ALLOCATORS[name]
    source = sample(dtype, device)
    with poisoned_empty():
        x = allocate(source)
    with poisoned_empty(0x3C):
        y = allocate(source)
    assert x.dtype == dtype
    assert x.shape == (3, 4)
    assert (storage_bytes(x) == 0xA5).all()
    assert (storage_bytes(y) == 0x3C).all()
    assert storage_bytes(x).numel() >= 12 * dtype.itemsize
    assert not source.view(torch.uint8).any()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_small_shapes(shape):
    with poisoned_empty(1):
        x = torch.empty(shape, dtype=torch.uint8)
    assert x.shape == shape
    assert (x == 1).all()


def test_nested():
    with poisoned_empty(7):
        with poisoned_empty(8):
            assert torch.empty(1, dtype=torch.uint8).item() == 8
        assert torch.empty(1, dtype=torch.uint8).item() == 7


def test_everything_is_restored():
    names = ["empty", "empty_like", "empty_permuted", "empty_strided"]
    before = [getattr(torch, name) for name in names]

    def fail():
        assert torch.empty is not before[0]
        raise KeyError

    with pytest.raises(KeyError), poisoned_empty(), poisoned_empty(1):
        fail()
    assert [getattr(torch, name) for name in names] == before
    assert "new_empty" not in vars(torch.Tensor)
    assert "new_empty_strided" not in vars(torch.Tensor)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_initialised_tensors_are_left_alone():
    with poisoned_empty():
        assert not torch.zeros(5).any()
        assert torch.full((2,), 3.0).tolist() == [3.0, 3.0]
        assert (torch.arange(4) + 1).tolist() == [1, 2, 3, 4]
        x = torch.ones(4)
        assert x.clone().tolist() == [1.0] * 4
        torch.empty(2, out=x[:2])
        assert x.tolist() == [1.0] * 4


def test_gradients_and_strides_are_kept():
    with poisoned_empty(0):
        x = torch.empty(2, 3, requires_grad=True)
        y = torch.empty_like(torch.zeros(4, 5).t())
    assert x.requires_grad
    assert x.is_leaf
    assert y.stride() == (1, 5)
    x.sum().backward()
    assert x.grad.tolist() == [[1.0] * 3] * 2


def test_backward_passes_are_poisoned():
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, grad):
            return torch.empty_like(grad)

    x = torch.zeros(3, requires_grad=True)
    with poisoned_empty(0xFF):
        Forgetful.apply(x).sum().backward()
    assert x.grad.isnan().all()


def test_names_bound_before_are_poisoned():
    allocate = torch.empty
    with poisoned_empty(5):
        assert allocate(3, dtype=torch.uint8).tolist() == [5] * 3


def test_operators_written_in_python_are_poisoned():
    def forgetful(x):
        return torch.empty_like(x)

    library = torch.library.Library("tile_kernels_test_poison", "FRAGMENT")
    try:
        library.define("forgetful(Tensor x) -> Tensor")
        library.impl("forgetful", forgetful, "CPU")
        with poisoned_empty(0x11):
            x = torch.ops.tile_kernels_test_poison.forgetful(torch.zeros(3, dtype=torch.uint8))
        assert x.tolist() == [0x11] * 3
    finally:
        library._destroy()


def test_threads_are_poisoned():
    with poisoned_empty(0x22), ThreadPoolExecutor(1) as pool:
        x = pool.submit(lambda: torch.empty(2, dtype=torch.uint8)).result()
    assert x.tolist() == [0x22] * 2


def test_meta_and_fake_tensors_are_left_alone():
    with poisoned_empty():
        assert torch.empty(2**50, device="meta").device.type == "meta"
        with FakeTensorMode():
            fake = torch.empty(2**40)
            assert isinstance(fake, FakeTensor)
            assert isinstance(torch.empty_like(fake), FakeTensor)


def test_sparse_tensors_are_left_alone():
    with poisoned_empty():
        assert torch.empty((2, 2), layout=torch.sparse_coo).is_sparse


def test_finds_an_unwritten_element():
    def kernel(forget):
        out = torch.empty(16, dtype=torch.int32)
        out[: 15 if forget else 16] = 3
        return out

    def run(forget):
        with poisoned_empty(0xA5):
            first = kernel(forget)
        with poisoned_empty(0x5A):
            second = kernel(forget)
        assert_equal(first, second)

    run(forget=False)
    with pytest.raises(AssertionError, match=r"1 of 16 elements.*\n  \[15\]"):
        run(forget=True)


@pytest.mark.parametrize(("byte", "error"), [(256, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_bad_byte(byte, error):
    with pytest.raises(error, match="byte must be"), poisoned_empty(byte):
        pass
