from tile_kernels.quant.back.op import (
    cast_back as cast_back,
    per_token_cast_back as per_token_cast_back,
)
from tile_kernels.quant.common import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
from tile_kernels.quant.fake.op import (
    fake_cast as fake_cast,
    per_token_cast_and_cast_back as per_token_cast_and_cast_back,
)
from tile_kernels.quant.lossless.op import per_block_cast_lossless as per_block_cast_lossless
from tile_kernels.quant.norm.op import (
    norm_backward as norm_backward,
    norm_forward as norm_forward,
    norm_forward_and_per_token_cast as norm_forward_and_per_token_cast,
)
from tile_kernels.quant.per_block.op import (
    per_block_cast as per_block_cast,
    per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only as per_block_cast_with_sf_only,
)
from tile_kernels.quant.per_channel.op import (
    per_channel_cast as per_channel_cast,
    per_channel_cast_and_transpose as per_channel_cast_and_transpose,
    per_channel_cast_fused as per_channel_cast_fused,
    per_channel_cast_fused_and_transpose as per_channel_cast_fused_and_transpose,
    swiglu_forward_and_per_channel_cast_and_transpose as swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.quant.per_token.op import (
    per_token_cast as per_token_cast,
    per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only as per_token_cast_with_sf_only,
)
from tile_kernels.quant.plain.op import cast as cast, plain_cast as plain_cast
from tile_kernels.quant.split.op import split_to_bf16 as split_to_bf16
from tile_kernels.quant.swiglu.op import (
    swiglu_backward as swiglu_backward,
    swiglu_backward_and_per_token_cast as swiglu_backward_and_per_token_cast,
    swiglu_forward as swiglu_forward,
    swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast,
)
from tile_kernels.quant.weight_scales import (
    batched_transpose_weight_sf as batched_transpose_weight_sf,
    blocked_scales as blocked_scales,
)
