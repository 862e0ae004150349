"""Curvature estimators on shards. What is estimated always refers to the published weight, which the loss depends on.

A `SumsEstimator` measures row and column sums, of which the default scores are made, and forms no weight-shaped matrix:

    fisher          squared gradients per token, by layer hooks in the training step itself or in passes of their own
    hutchinson      v (H v) by a central gradient difference, v at the outputs of layers
    wanda           mean squared input of each column (arXiv 2306.11695), forward only

An `Estimator` measures elements, one fp32 number a weight, if `curvature.factored` or `per_token` is false:

    hutchinson      v at the weights (the paper's, eq. 2)
    fisher

The curvature of a routed expert is the mean over the tokens that it saw on all ranks; zero if it saw none.
"""
