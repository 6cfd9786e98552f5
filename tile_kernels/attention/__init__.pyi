from tile_kernels.attention.cache.op import (
    cache_indices as cache_indices,
    kv_cache_append as kv_cache_append,
    kv_cache_gather as kv_cache_gather,
)
from tile_kernels.attention.cache_layout import (
    kv_cache_bytes as kv_cache_bytes,
    kv_cache_empty as kv_cache_empty,
)
from tile_kernels.attention.attention_bwd.op import (
    hca_attention_bwd as hca_attention_bwd,
    sparse_attention_bwd as sparse_attention_bwd,
)
from tile_kernels.attention.compress.op import (
    kv_compress as kv_compress,
    kv_compress_bwd as kv_compress_bwd,
    kv_compress_packed as kv_compress_packed,
    kv_compress_packed_bwd as kv_compress_packed_bwd,
)
from tile_kernels.attention.decode.op import (
    decode_plan as decode_plan,
    flash_mla_with_kvcache as flash_mla_with_kvcache,
    sparse_attention_decode as sparse_attention_decode,
)
from tile_kernels.attention.hca.op import hca_attention as hca_attention
from tile_kernels.attention.indices.op import attention_indices as attention_indices
from tile_kernels.attention.kl.op import indexer_kl as indexer_kl
from tile_kernels.attention.logits.op import (
    indexer_logits as indexer_logits,
    indexer_logits_bwd as indexer_logits_bwd,
)
from tile_kernels.attention.norm_rope.op import (
    kv_compress_norm_rope_cast as kv_compress_norm_rope_cast,
)
from tile_kernels.attention.ranges import indexer_ranges as indexer_ranges
from tile_kernels.attention.select.op import indexer_select as indexer_select
from tile_kernels.attention.sparse.op import (
    flash_mla_sparse_fwd as flash_mla_sparse_fwd,
    sparse_attention as sparse_attention,
)
from tile_kernels.attention.step.op import kv_compress_step as kv_compress_step
from tile_kernels.attention.step.state import KVCompressorState as KVCompressorState
from tile_kernels.attention.target.op import attention_target as attention_target
from tile_kernels.attention.topk.op import indexer_topk as indexer_topk
