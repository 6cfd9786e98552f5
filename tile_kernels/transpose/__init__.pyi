from tile_kernels.transpose.op import batched_transpose as batched_transpose, transpose as transpose
