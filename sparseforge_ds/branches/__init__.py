"""Start of low-rank branches on this rank's shards: by a shift, by a decomposition, or from what a mask removes."""
