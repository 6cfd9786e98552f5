pytest_plugins = ["tile_kernels.testing.pytest_plugin", "pytester"]
