"""Where tensors live: the plumbing between DeepSpeed and the equations of `mask/`. There is no equation here.

A weight's journey through one optimizer step, on every ZeRO stage and at every world size, while masks move:

    optimizer state of this rank's flat partition          DeepSpeed, unchanged
    dense W   mask m   exp_avg ...
        |                                                  gradients: reduced, unscaled, clipped
        |  pre hook: master.data = W (pointer swap)                  |
        +--------------> inner optimizer step <----------------------+
        |
        |  post hook: master = m_eff * W
        v
    fp32 master  --->  cast to bf16  --->  all-gather when a layer needs it  --->  forward, backward
                       partition on its rank                                      (never sees m or W)

Once masks are frozen the master is W: gradients of pruned weights are zeroed before their norm is taken, and nothing is
published.

shard       which elements of which weight this rank holds, and the ranks' collectives
deepspeed_layouts  a shard map for each of DeepSpeed's optimizers: the only code that reads their layout
refuse      engine settings under which the journey would break, as errors at attach time
state       W, mask and curvature as optimizer state, and the one bit a weight that is left once masks are frozen
step_hooks  the two hooks around the inner optimizer's step
gradient_hooks  zeroes gradients of frozen pruned weights before their norm is taken
restore     an engine of any layout filled from a checkpoint of any layout
halo        groups that a shard boundary cuts
matrices    one table of sums for all matrices
layer_hooks what linear layers see and receive during a pass
probe       an extra forward and backward that leaves no trace
"""
