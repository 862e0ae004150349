"""The equations of `mask` made fast: in chunks, with masks as 16-bit codes and choices as bits, compiled together.

On a CPU each function here gives the bits of a readable one outside, sums excepted, and a test says so
(`tests/unit/mask/kernels`). Whether code is compiled or runs step by step is decided here alone. Triton kernels
of our own are launched by `tiles` (programs in `tile_programs`) and by `fisher` (in `layer_programs`).
"""
