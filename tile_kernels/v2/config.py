"""Settings: those of `tile_kernels.config`."""

from tile_kernels.config import (
    get_amax_clamp_for_quant as get_amax_clamp_for_quant,
    get_deterministic_algorithms as get_deterministic_algorithms,
    get_device as get_device,
    get_device_num_sms as get_device_num_sms,
    get_max_smem_per_sm as get_max_smem_per_sm,
    get_max_ub_per_vector_core as get_max_ub_per_vector_core,
    get_num_ai_cores as get_num_ai_cores,
    get_num_cube_cores as get_num_cube_cores,
    get_num_sms as get_num_sms,
    get_num_vec_cores as get_num_vec_cores,
    get_pdl as get_pdl,
    get_token_alignment as get_token_alignment,
    is_ascend as is_ascend,
    reset_runtime_config as reset_runtime_config,
    set_amax_clamp_for_quant as set_amax_clamp_for_quant,
    set_num_sms as set_num_sms,
    set_pdl as set_pdl,
    set_token_alignment as set_token_alignment,
    use_deterministic_algorithms as use_deterministic_algorithms,
)
