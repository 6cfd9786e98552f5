from tile_kernels.attention.compress.op import (
    kv_compress as kv_compress,
    kv_compress_bwd as kv_compress_bwd,
    kv_compress_packed as kv_compress_packed,
    kv_compress_packed_bwd as kv_compress_packed_bwd,
)
from tile_kernels.attention.logits.op import (
    indexer_logits as indexer_logits,
    indexer_logits_bwd as indexer_logits_bwd,
)
from tile_kernels.attention.norm_rope.op import (
    kv_compress_norm_rope_cast as kv_compress_norm_rope_cast,
)
from tile_kernels.attention.ranges import indexer_ranges as indexer_ranges
from tile_kernels.attention.select.op import indexer_select as indexer_select
from tile_kernels.attention.step.op import kv_compress_step as kv_compress_step
from tile_kernels.attention.step.state import KVCompressorState as KVCompressorState
from tile_kernels.attention.topk.op import indexer_topk as indexer_topk
