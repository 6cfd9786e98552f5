from tile_kernels.transform.rotary.op import (
    apply_rotary as apply_rotary,
    rotary_embedding as rotary_embedding,
)
