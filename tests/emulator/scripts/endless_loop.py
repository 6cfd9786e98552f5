"""A kernel that does not end, launched as if a GPU were there."""

import tilelang
import tilelang.language as T
import torch


@T.prim_func
def spin(y: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        t = T.get_thread_binding()
        total = T.alloc_local((1,), "float32")
        for i in T.serial(2_000_000_000):
            total[0] = total[0] * 1.0001 + T.cast(i, "float32")
        y[t] = total[0]


kernel = tilelang.compile(spin)
print("compiled", flush=True)
kernel(torch.zeros(64, device="cuda"))
