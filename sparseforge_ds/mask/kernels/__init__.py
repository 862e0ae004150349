"""The equations of `mask` made fast: in chunks, masks as 16-bit codes, choices as bits, one compiled kernel a chain.

Each function here gives the bits of a readable one outside, and a test says so (`tests/unit/mask/kernels`). A change
for speed is made here, and nowhere else; so is every choice between compiled code and code that runs step by step.
"""
