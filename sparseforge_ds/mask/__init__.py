"""The paper on plain tensors: one function an equation (SparseForge, arXiv 2605.06402). Needs torch and nothing else.

The numbers are those of docs/concepts/equations.md.

| eq. | name | function |
|---|---|---|
| 1 | published weight | `effective_mask.published` |
| 2 | curvature | `curvature.hutchinson_sample`, `curvature.fisher_sums`, `factored.rank_one`, `curvature.accumulate` |
| 3 | score | `importance.score` |
| 4 | standardize | `importance.standardize` |
| 5 | soft gate | `update.threshold`, `update.soft_gate` |
| 6 | target | `pattern.top_n` |
| 7 | blend | `update.blend` |
| 8 | penalty | `update.penalize` |
| 9 | mask | `update.move`; all of 3 to 9 in order: `update.update_mask` |
| 10 | harden | `effective_mask.effective_mask` |
| 11 | project | `pattern.top_n` of the mask |
| 14 | quantization | `quantization.quantized` |
| - | schedules | `anneal.Schedule.dials` |

These functions say what is computed. `mask.kernels` computes the same on
millions of elements at a time: on a CPU bit for bit, sums excepted.
"""
